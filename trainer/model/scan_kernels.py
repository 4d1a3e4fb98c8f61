"""The gated recurrence in Triton: gates, scan and gradients in one pass over memory each way.

A program owns one row of the batch and `CHANNELS` channels, and walks the row in tiles of `SEGMENTS * STEPS` positions,
keeping the state in float32 registers. Inside a tile each segment first runs from zero, all segments side by side; then a
scan over the few segments gives each its true initial state, which is added with the decays' products. So gates and scan use
`SEGMENTS` times more threads than there are channels, without which few rows could not fill a GPU. Decays only shrink
(a <= 1) and are never divided by: an underflow is a correct zero.

Nothing depends on which programs run together and nothing is added atomically: results repeat bit for bit, and a row's are
the same in any batch. Formulas are those of `recurrence.gated_coefficients`, which is what the tests compare with.
"""

# No `from __future__ import annotations`: Triton reads annotations as objects. And of `triton.language` only builtins: its
# own @jit functions (`tl.sum`) would be compiled ones where the tests interpret just this module.

import triton
import triton.language as tl

from trainer.model.recurrence import GATE_SHARPNESS

SHARPNESS = tl.constexpr(GATE_SHARPNESS)
TINY = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal float32, as in `gated_coefficients`."""


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def softplus_and_slope(x):
    """`softplus(x)` and its slope `sigmoid(x)`, accurate for very negative x, too, where `log(1 + exp(x))` would lose all digits."""
    u = tl.exp(-tl.abs(x))
    # log(1 + u) = 2 atanh(u / (2 + u)), a quickly converging series, since the argument is at most 1/3.
    s = u / (2.0 + u)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15)))))))
    slope = tl.where(x > 0, 1.0, u) / (1.0 + u)
    return tl.maximum(x, 0.0) + 2.0 * s * series, slope


@triton.jit
def one_minus_square(a, log_a):
    """`1 - a^2` for `a = exp(log_a)`, without the cancellation where a is close to 1: there it is `-2 a sinh(log a)`."""
    square = log_a * log_a
    sinh = log_a * (1.0 + square * (1 / 6 + square * (1 / 120 + square * (1 / 5040))))
    return tl.where(log_a > -0.5, -2.0 * a * sinh, 1.0 - a * a)


@triton.jit
def chain(scale_1, shift_1, scale_before_1, shift_before_1, scale_2, shift_2, scale_before_2, shift_before_2):
    """Run maps `s -> scale * s + shift` one after the other; `before` is the same without the last of them."""
    return (
        scale_2 * scale_1,
        scale_2 * shift_1 + shift_2,
        scale_before_2 * scale_1,
        scale_before_2 * shift_1 + shift_before_2,
    )


@triton.jit
def initial_states(scale, shift, state):
    """The state before each segment [SEGMENTS, CHANNELS], from each segment's map and the state [CHANNELS] before them."""
    _, _, scale_before, shift_before = tl.associative_scan(
        (scale, shift, tl.full(scale.shape, 1.0, tl.float32), tl.full(scale.shape, 0.0, tl.float32)), 0, chain
    )
    return scale_before * state[None, :] + shift_before


@triton.jit
def load_resets(resets, t, num_steps, STEPS: tl.constexpr, STRIDE: tl.constexpr):
    """The resets at times t, t + STRIDE, ... [SEGMENTS, 1] each; none outside the row."""
    found = ()
    for step in tl.static_range(STEPS):
        is_inside = (t >= 0) & (t < num_steps)
        found = found + (tl.load(resets + t, mask=is_inside, other=0),)
        t += STRIDE
    return found


@triton.jit
def forward_kernel(
    recurrence_gate, input_gate, x, decay, resets, state, h, final_state,
    num_steps, dim,
    HAS_RESETS: tl.constexpr, CHANNELS: tl.constexpr, SEGMENTS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Read r, i, x [B, T, D], Lambda [D], resets [B, T] and the state [B, D]; write h [B, T, D] and the final state."""
    blocks = (dim + CHANNELS - 1) // CHANNELS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < dim
    segment = tl.arange(0, SEGMENTS)[:, None]
    softplus, _ = softplus_and_slope(tl.load(decay + channel, mask=is_channel, other=0.0).to(tl.float32))
    rate = (softplus * -SHARPNESS)[None, :]
    carried = tl.load(state + row * dim + channel, mask=is_channel, other=0.0)

    # Single bytes cannot be copied asynchronously like the rest, so resets are loaded a tile ahead by hand.
    if HAS_RESETS:
        resets += row * num_steps
        next_resets = load_resets(resets, segment * STEPS, num_steps, STEPS, 1)

    for first in tl.range(0, num_steps, SEGMENTS * STEPS, num_stages=STAGES):
        if HAS_RESETS:
            is_reset = next_resets
            next_resets = load_resets(resets, first + (SEGMENTS + segment) * STEPS, num_steps, STEPS, 1)
        end = tl.full([SEGMENTS, CHANNELS], 0.0, tl.float32)
        product = tl.full([SEGMENTS, CHANNELS], 1.0, tl.float32)
        ends = ()
        products = ()
        for step in tl.static_range(STEPS):
            t = first + segment * STEPS + step
            is_inside = t < num_steps
            mask = is_inside & is_channel[None, :]
            offset = (row * num_steps + t) * dim + channel[None, :]
            r = tl.load(recurrence_gate + offset, mask=mask, other=0.0).to(tl.float32)
            i = tl.load(input_gate + offset, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
            log_a = rate * sigmoid(r)
            a = tl.exp(log_a)
            square = one_minus_square(a, log_a)
            b = tl.sqrt(tl.where(square < TINY, TINY, square)) * sigmoid(i) * value
            if HAS_RESETS:
                a = tl.where(is_reset[step] != 0, 0.0, a)
            # Past the end of the row the state stays what it is: x is 0 there, hence b.
            a = tl.where(is_inside, a, 1.0)
            end = a * end + b
            product = product * a
            ends = ends + (end,)
            products = products + (product,)
        initial = initial_states(product, end, carried)
        for step in tl.static_range(STEPS):
            t = first + segment * STEPS + step
            mask = (t < num_steps) & is_channel[None, :]
            offset = (row * num_steps + t) * dim + channel[None, :]
            end = products[step] * initial + ends[step]
            tl.store(h + offset, end.to(h.dtype.element_ty), mask=mask)
        carried = tl.reduce(tl.where(segment == SEGMENTS - 1, end, 0.0), 0, add)
    tl.store(final_state + row * dim + channel, carried, mask=is_channel)


@triton.jit
def backward_kernel(
    grad_h, grad_final_state, recurrence_gate, input_gate, x, decay, resets, state, h,
    grad_recurrence_gate, grad_input_gate, grad_x, grad_decay, grad_state,
    num_steps, dim,
    HAS_RESETS: tl.constexpr, CHANNELS: tl.constexpr, SEGMENTS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The forward's gradients, walking from the last position to the first; `grad_decay` [B, D] is each row's share.

    With g_t the gradient of h_t, `g_t = grad_h_t + a_{t+1} g_{t+1}`; what is carried is `a_{t+1} g_{t+1}`. Every gradient at
    a position is g_t times a factor that does not depend on g.
    """
    blocks = (dim + CHANNELS - 1) // CHANNELS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < dim
    segment = tl.arange(0, SEGMENTS)[:, None]
    softplus, slope = softplus_and_slope(tl.load(decay + channel, mask=is_channel, other=0.0).to(tl.float32))
    rate = (softplus * -SHARPNESS)[None, :]
    first_state = tl.load(state + row * dim + channel, mask=is_channel, other=0.0)[None, :]
    carried = tl.load(grad_final_state + row * dim + channel, mask=is_channel, other=0.0)
    grad_rate = tl.full([SEGMENTS, CHANNELS], 0.0, tl.float32)
    last = (num_steps + SEGMENTS * STEPS - 1) // (SEGMENTS * STEPS) * (SEGMENTS * STEPS) - 1

    if HAS_RESETS:
        resets += row * num_steps
        next_resets = load_resets(resets, last - segment * STEPS, num_steps, STEPS, -1)

    for behind in tl.range(0, num_steps, SEGMENTS * STEPS, num_stages=STAGES):
        if HAS_RESETS:
            is_reset = next_resets
            next_resets = load_resets(resets, last - behind - (SEGMENTS + segment) * STEPS, num_steps, STEPS, -1)
        end = tl.full([SEGMENTS, CHANNELS], 0.0, tl.float32)
        product = tl.full([SEGMENTS, CHANNELS], 1.0, tl.float32)
        ends = ()
        products = ()
        per_rate = ()
        per_r = ()
        per_i = ()
        per_x = ()
        for step in tl.static_range(STEPS):
            t = last - behind - segment * STEPS - step
            is_inside = t < num_steps
            mask = is_inside & is_channel[None, :]
            offset = (row * num_steps + t) * dim + channel[None, :]
            r = tl.load(recurrence_gate + offset, mask=mask, other=0.0).to(tl.float32)
            i = tl.load(input_gate + offset, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_h + offset, mask=mask, other=0.0).to(tl.float32)
            previous = tl.load(h + offset - dim, mask=mask & (t > 0), other=0.0).to(tl.float32)
            previous = tl.where(t == 0, first_state, previous)
            sigmoid_r = sigmoid(r)
            sigmoid_i = sigmoid(i)
            log_a = rate * sigmoid_r
            a = tl.exp(log_a)
            square = one_minus_square(a, log_a)
            root = tl.sqrt(tl.where(square < TINY, TINY, square))
            # At the floor the root has no slope.
            root_slope = tl.where(square < TINY, 0.0, -a * a / root)
            if HAS_RESETS:
                a = tl.where(is_reset[step] != 0, 0.0, a)
            a = tl.where(is_inside, a, 1.0)
            end = end + grad
            ends = ends + (end,)
            products = products + (product,)
            end = a * end
            product = product * a
            # Both x and the state before are 0 past the end of the row, and so are these factors.
            of_log_a = a * previous + root_slope * sigmoid_i * value
            per_rate = per_rate + (of_log_a * sigmoid_r,)
            per_r = per_r + (of_log_a * log_a * (1.0 - sigmoid_r),)
            per_i = per_i + (root * sigmoid_i * value * (1.0 - sigmoid_i),)
            per_x = per_x + (root * sigmoid_i,)
        initial = initial_states(product, end, carried)
        carried = tl.reduce(tl.where(segment == SEGMENTS - 1, product * initial + end, 0.0), 0, add)
        for step in tl.static_range(STEPS):
            t = last - behind - segment * STEPS - step
            mask = (t < num_steps) & is_channel[None, :]
            offset = (row * num_steps + t) * dim + channel[None, :]
            grad = products[step] * initial + ends[step]
            grad_rate += grad * per_rate[step]
            tl.store(
                grad_recurrence_gate + offset,
                (grad * per_r[step]).to(grad_recurrence_gate.dtype.element_ty),
                mask=mask,
            )
            tl.store(grad_input_gate + offset, (grad * per_i[step]).to(grad_input_gate.dtype.element_ty), mask=mask)
            tl.store(grad_x + offset, (grad * per_x[step]).to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_state + row * dim + channel, carried, mask=is_channel)
    tl.store(grad_decay + row * dim + channel, slope * -SHARPNESS * tl.reduce(grad_rate, 0, add), mask=is_channel)
