"""The gated recurrence in Triton: gates, scan and gradients in one pass over memory each way.

A program owns one row of the batch and `CHANNELS` channels, and walks the row in tiles of `SEGMENTS * STEPS` positions,
keeping the state in float32 registers. Inside a tile each segment first runs from zero, all segments side by side; then a
scan over the few segments gives each its true initial state, which is added with the decays' products. So gates and scan use
`SEGMENTS` times more threads than there are channels, without which few rows could not fill a GPU. Decays only shrink
(a <= 1) and are never divided by: an underflow is a correct zero.

Nothing depends on which programs run together and nothing is added atomically: results repeat bit for bit, and a row's are
the same in any batch. Formulas are those of `recurrence.gated_scan`, which is what the tests compare with.
"""

# No `from __future__ import annotations`: Triton reads annotations as objects. And of `triton.language` only builtins: its
# own @jit functions (`tl.sum`) would be compiled ones where the tests interpret just this module.

import triton
import triton.language as tl

from trainer.model.protocol import GATE_SHARPNESS

SHARPNESS = tl.constexpr(GATE_SHARPNESS)
TINY = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal float32, as in `gated_scan`."""


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def softplus_and_slope(x):
    """`softplus(x)` and its slope `sigmoid(x)`, accurate where `log(1 + exp(x))` would lose all digits, too."""
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
def load(pointer, offset, mask):
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointer, offset, value, mask):
    tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_resets(resets, t, num_steps, STEPS: tl.constexpr, STRIDE: tl.constexpr):
    """The resets at times t, t + STRIDE, ... [SEGMENTS, 1] each; none outside the row."""
    found = ()
    for step in tl.static_range(STEPS):
        time = t + step * STRIDE
        found = found + (tl.load(resets + time, mask=(time >= 0) & (time < num_steps), other=0),)
    return found


@triton.jit
def decay_and_root(r, rate):
    """`log a`, a, `1 - a^2` and its root, with the floor of `gated_scan`."""
    log_a = rate * sigmoid(r)
    a = tl.exp(log_a)
    square = one_minus_square(a, log_a)
    return log_a, a, square, tl.sqrt(tl.where(square < TINY, TINY, square))


@triton.jit
def gradient_factors(log_a, a, square, root, sigmoid_r, sigmoid_i, value, previous, is_kept):
    """What the gradient of h is multiplied by for those of the rate, r, i and x; `is_kept` is 0 at a reset."""
    # At its floor the root has no slope.
    root_slope = tl.where(square < TINY, 0.0, -a * a / root)
    of_log_a = tl.where(is_kept, a * previous, 0.0) + root_slope * sigmoid_i * value
    of_x = root * sigmoid_i
    return of_log_a * sigmoid_r, of_log_a * log_a * (1.0 - sigmoid_r), of_x * value * (1.0 - sigmoid_i), of_x


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
    softplus, _slope = softplus_and_slope(load(decay, channel, is_channel))
    rate = (softplus * -SHARPNESS)[None, :]
    carried = load(state, row * dim + channel, is_channel)
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
        kept = ()
        for step in tl.static_range(STEPS):
            t = first + segment * STEPS + step
            is_inside = t < num_steps
            mask = is_inside & is_channel[None, :]
            offset = (row * num_steps + t) * dim + channel[None, :]
            _, a, _, root = decay_and_root(load(recurrence_gate, offset, mask), rate)
            b = root * sigmoid(load(input_gate, offset, mask)) * load(x, offset, mask)
            if HAS_RESETS:
                a = tl.where(is_reset[step] != 0, 0.0, a)
            # Past the end of the row the state stays what it is: x is 0 there, hence b.
            a = tl.where(is_inside, a, 1.0)
            end = a * end + b
            product = product * a
            kept = kept + ((product, end),)
        initial = initial_states(product, end, carried)
        for step in tl.static_range(STEPS):
            t = first + segment * STEPS + step
            offset = (row * num_steps + t) * dim + channel[None, :]
            end = kept[step][0] * initial + kept[step][1]
            store(h, offset, end, (t < num_steps) & is_channel[None, :])
        carried = tl.reduce(tl.where(segment == SEGMENTS - 1, end, 0.0), 0, add)
    store(final_state, row * dim + channel, carried, is_channel)


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
    softplus, slope = softplus_and_slope(load(decay, channel, is_channel))
    rate = (softplus * -SHARPNESS)[None, :]
    first_state = load(state, row * dim + channel, is_channel)[None, :]
    carried = load(grad_final_state, row * dim + channel, is_channel)
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
        kept = ()
        for step in tl.static_range(STEPS):
            t = last - behind - segment * STEPS - step
            is_inside = t < num_steps
            mask = is_inside & is_channel[None, :]
            offset = (row * num_steps + t) * dim + channel[None, :]
            r, i = load(recurrence_gate, offset, mask), load(input_gate, offset, mask)
            value = load(x, offset, mask)
            previous = tl.where(t == 0, first_state, load(h, offset - dim, mask & (t > 0)))
            log_a, a, square, root = decay_and_root(r, rate)
            is_kept = is_inside
            if HAS_RESETS:
                is_kept = is_inside & (is_reset[step] == 0)
            # Past the end of the row x and the state before are 0, hence the factors, and the gradient stays what it is.
            factors = gradient_factors(log_a, a, square, root, sigmoid(r), sigmoid(i), value, previous, is_kept)
            end = end + load(grad_h, offset, mask)
            kept = kept + ((product, end, factors),)
            a = tl.where(is_kept, a, tl.where(is_inside, 0.0, 1.0))
            end = a * end
            product = product * a
        initial = initial_states(product, end, carried)
        carried = tl.reduce(tl.where(segment == SEGMENTS - 1, product * initial + end, 0.0), 0, add)
        for step in tl.static_range(STEPS):
            t = last - behind - segment * STEPS - step
            mask = (t < num_steps) & is_channel[None, :]
            offset = (row * num_steps + t) * dim + channel[None, :]
            grad = kept[step][0] * initial + kept[step][1]
            per_rate, per_r, per_i, per_x = kept[step][2]
            grad_rate += grad * per_rate
            store(grad_recurrence_gate, offset, grad * per_r, mask)
            store(grad_input_gate, offset, grad * per_i, mask)
            store(grad_x, offset, grad * per_x, mask)
    store(grad_state, row * dim + channel, carried, is_channel)
    store(grad_decay, row * dim + channel, slope * -SHARPNESS * tl.reduce(grad_rate, 0, add), is_channel)
