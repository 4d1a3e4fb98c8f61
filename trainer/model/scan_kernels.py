"""The gated recurrence in Triton: gates, scan and gradients in one pass over memory each way.

A program owns one row of the batch and `CHANNELS` channels, and walks the row in tiles of `SEGMENTS
* STEPS` positions, keeping the state in float32 registers. Inside a tile each segment first runs
from zero, all segments side by side; then a scan over the few segments gives each its true initial
state, from which it runs again. So gates and scan use `SEGMENTS` times more threads than there are
channels, without which few rows could not fill a GPU. Decays only shrink (a <= 1) and are never
divided by: an underflow is a correct zero. Instructions limit the kernels before memory does: about
53 for each value of the forward, 79 of the backward.

Nothing depends on which programs run together and nothing is added atomically: results repeat bit
for bit, and a row's are the same in any batch. Formulas are those of `recurrence.gated_scan`, which
is what the tests compare with.
"""

# No `from __future__ import annotations`: Triton reads annotations as objects. And of
# `triton.language` only builtins: its own @jit functions (`tl.sum`) would be compiled ones where
# the tests interpret just this module.

import math

import triton
import triton.language as tl

from trainer.model.protocol import GATE_SHARPNESS

SHARPNESS = tl.constexpr(GATE_SHARPNESS)
TINY = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal float32, as in `gated_scan`."""
INFINITY = tl.constexpr(math.inf)
# Exponentials are powers of two and divisions are `rsqrt`: one instruction each on a GPU, where
# `exp` takes five and `/` nine.
LOG2_E = tl.constexpr(1 / math.log(2))
SINH_1, SINH_3, SINH_5, SINH_7 = (tl.constexpr(-2 * math.log(2) ** n / math.factorial(n)) for n in (1, 3, 5, 7))


@triton.jit
def sigmoid(x):
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def softplus_and_slope(x):
    # Accurate even where `log(1 + exp(x))` would lose all digits.
    u = tl.exp(-tl.abs(x))
    # log(1 + u) = 2 atanh(u / (2 + u)) converges quickly: the argument is at most 1/3.
    s = u / (2.0 + u)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15)))))))
    slope = tl.where(x > 0, 1.0, u) / (1.0 + u)
    return tl.maximum(x, 0.0) + 2.0 * s * series, slope


@triton.jit
def one_minus_square(a, log_a):
    # For a = exp2(log_a). Near a = 1 it is `-2 a sinh(log(2) log_a)`, which does not cancel.
    q = log_a * log_a
    sinh = log_a * (SINH_1 + q * (SINH_3 + q * (SINH_5 + q * SINH_7)))
    return tl.where(log_a > -0.75, a * sinh, 1.0 - a * a)


@triton.jit
def chain(scale_1, shift_1, scale_before_1, shift_before_1, scale_2, shift_2, scale_before_2, shift_before_2):
    # Maps `s -> scale * s + shift` in turn; `before` is the same without the last of them.
    return (
        scale_2 * scale_1,
        scale_2 * shift_1 + shift_2,
        scale_before_2 * scale_1,
        scale_before_2 * shift_1 + shift_before_2,
    )


@triton.jit
def enter_segments(scale, shift, state, segment, SEGMENTS: tl.constexpr):
    # The state before each segment, and after all [1, CHANNELS], by scanning their maps; see chain.
    scale, shift, scale_before, shift_before = tl.associative_scan(
        (scale, shift, tl.full(scale.shape, 1.0, tl.float32), tl.full(scale.shape, 0.0, tl.float32)), 0, chain
    )
    last = tl.reduce(tl.where(segment == SEGMENTS - 1, scale * state + shift, 0.0), 0, add)
    return scale_before * state + shift_before, last[None, :]


@triton.jit
def load(pointer, offset, mask):
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_steps(pointer, first, time, num_steps, dim, channel, is_channel, other, STEPS: tl.constexpr):
    # A row's values from `first + time` on: [SEGMENTS, CHANNELS] each; `other` outside the row.
    pointer += tl.cast(first, tl.int64) * dim
    found = ()
    for step in tl.static_range(STEPS):
        mask = (first + time + step >= 0) & (first + time + step < num_steps) & is_channel
        found = found + (tl.load(pointer + ((time + step) * dim + channel), mask=mask, other=other),)
    return found


@triton.jit
def load_gates(r, i, x, first, time, num_steps, dim, channel, is_channel, STEPS: tl.constexpr):
    # Past the end of the row the state stays what it is: a is 1 and x is 0 there.
    rs = load_steps(r, first, time, num_steps, dim, channel, is_channel, -INFINITY, STEPS)
    gates = load_steps(i, first, time, num_steps, dim, channel, is_channel, 0.0, STEPS)
    return rs, gates, load_steps(x, first, time, num_steps, dim, channel, is_channel, 0.0, STEPS)


@triton.jit
def store(pointer, first, time, num_steps, dim, channel, is_channel, value):
    pointer += tl.cast(first, tl.int64) * dim
    mask = (first + time < num_steps) & is_channel
    tl.store(pointer + (time * dim + channel), value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def forward_kernel(
    recurrence_gate, input_gate, x, decay, resets, state, h, final_state,
    num_steps, dim,
    HAS_RESETS: tl.constexpr, CHANNELS: tl.constexpr, SEGMENTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """From r, i, x [B, T, D], Lambda [D], resets [B, T], state [B, D]: h [B, T, D], final state."""
    blocks = (dim + CHANNELS - 1) // CHANNELS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    is_channel = channel < dim
    segment = tl.arange(0, SEGMENTS)[:, None]
    time = segment * STEPS
    columns = dim, channel, is_channel
    place = time, num_steps, dim, channel, is_channel
    softplus, _slope = softplus_and_slope(load(decay, channel, is_channel))
    rate = softplus * (-SHARPNESS * LOG2_E)
    carried = load(state, row * dim + channel, is_channel)
    begin = row * num_steps * dim

    inputs = recurrence_gate + begin, input_gate + begin, x + begin
    # Of the next tile, whose loads need not be waited for.
    next_rs, next_gates, next_values = load_gates(*inputs, 0, *place, STEPS)
    if HAS_RESETS:
        next_resets = load_steps(resets + row * num_steps, 0, time, num_steps, 1, 0, True, 0, STEPS)

    for first in tl.range(0, num_steps, SEGMENTS * STEPS):
        rs, gates, values = next_rs, next_gates, next_values
        ahead = first + SEGMENTS * STEPS
        next_rs, next_gates, next_values = load_gates(*inputs, ahead, *place, STEPS)
        if HAS_RESETS:
            is_reset = next_resets
            next_resets = load_steps(resets + row * num_steps, ahead, time, num_steps, 1, 0, True, 0, STEPS)
        end = tl.full([SEGMENTS, CHANNELS], 0.0, tl.float32)
        product = tl.full([SEGMENTS, CHANNELS], 1.0, tl.float32)
        kept = ()
        for step in tl.static_range(STEPS):
            log_a = rate * sigmoid(rs[step].to(tl.float32))
            a = tl.exp2(log_a)
            square = one_minus_square(a, log_a)
            # sqrt(square) * sigmoid(i) = square / sqrt(square * (1 + exp(-i))^2)
            inverse = 1.0 + tl.exp2(gates[step].to(tl.float32) * -LOG2_E)
            b = square * tl.rsqrt(square * inverse * inverse + TINY) * values[step].to(tl.float32)
            if HAS_RESETS:
                a = tl.where(is_reset[step] != 0, 0.0, a)
            end = a * end + b
            product = product * a
            kept = kept + ((a, b),)
        current, carried = enter_segments(product, end, carried, segment, SEGMENTS)
        for step in tl.static_range(STEPS):
            current = kept[step][0] * current + kept[step][1]
            store(h + begin, first, time + step, num_steps, *columns, current)
    tl.store(final_state + row * dim + channel, carried, mask=is_channel)


@triton.jit
def backward_kernel(
    grad_h, grad_final_state, recurrence_gate, input_gate, x, decay, resets, state, h,
    grad_recurrence_gate, grad_input_gate, grad_x, grad_decay, grad_state,
    num_steps, dim,
    HAS_RESETS: tl.constexpr, CHANNELS: tl.constexpr, SEGMENTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The gradients, from the last position to the first; `grad_decay` [B, D] is each row's share.

    With g_t the gradient of h_t, `g_t = grad_h_t + a_{t+1} g_{t+1}`; the last term is carried.
    """
    blocks = (dim + CHANNELS - 1) // CHANNELS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    is_channel = channel < dim
    segment = tl.arange(0, SEGMENTS)[:, None]
    time = (SEGMENTS - 1 - segment) * STEPS  # the first segment is the latest
    columns = dim, channel, is_channel
    place = time, num_steps, dim, channel, is_channel
    softplus, slope = softplus_and_slope(load(decay, channel, is_channel))
    rate = softplus * (-SHARPNESS * LOG2_E)
    carried = load(grad_final_state, row * dim + channel, is_channel)
    grad_rate = tl.full([SEGMENTS, CHANNELS], 0.0, tl.float32)
    begin = row * num_steps * dim
    last = (num_steps - 1) // (SEGMENTS * STEPS) * (SEGMENTS * STEPS)

    inputs = recurrence_gate + begin, input_gate + begin, x + begin
    # Past the end of the row the gradient stays what it is: a is 1 and everything else 0 there.
    next_grads = load_steps(grad_h + begin, last, *place, 0.0, STEPS)
    next_rs, next_gates, next_values = load_gates(*inputs, last, *place, STEPS)
    next_states = load_steps(h + begin, last, time - 1, num_steps - 1, *columns, 0.0, STEPS)
    if HAS_RESETS:
        next_resets = load_steps(resets + row * num_steps, last, time, num_steps, 1, 0, True, 0, STEPS)

    for behind in tl.range(0, num_steps, SEGMENTS * STEPS):
        first = last - behind
        grads, rs, gates, values, states = next_grads, next_rs, next_gates, next_values, next_states
        ahead = first - SEGMENTS * STEPS
        next_grads = load_steps(grad_h + begin, ahead, *place, 0.0, STEPS)
        next_rs, next_gates, next_values = load_gates(*inputs, ahead, *place, STEPS)
        next_states = load_steps(h + begin, ahead, time - 1, num_steps - 1, *columns, 0.0, STEPS)
        if HAS_RESETS:
            is_reset = next_resets
            next_resets = load_steps(resets + row * num_steps, ahead, time, num_steps, 1, 0, True, 0, STEPS)
        end = tl.full([SEGMENTS, CHANNELS], 0.0, tl.float32)
        product = tl.full([SEGMENTS, CHANNELS], 1.0, tl.float32)
        kept = ()
        for step in tl.static_range(STEPS - 1, -1, -1):
            sigmoid_r = sigmoid(rs[step].to(tl.float32))
            a = tl.exp2(rate * sigmoid_r)
            passed = a
            if HAS_RESETS:
                passed = tl.where(is_reset[step] != 0, 0.0, a)
            end = passed * (end + grads[step].to(tl.float32))
            product = product * passed
            kept = ((sigmoid_r, a, passed),) + kept
        current, carried = enter_segments(product, end, carried, segment, SEGMENTS)
        for step in tl.static_range(STEPS - 1, -1, -1):
            sigmoid_r, a, passed = kept[step]
            sigmoid_i = sigmoid(gates[step].to(tl.float32))
            previous = states[step].to(tl.float32)
            if step == 0:
                previous += load(state, row * dim + channel, (first + time == 0) & is_channel)
            grad = current + grads[step].to(tl.float32)
            current = passed * grad
            square = one_minus_square(a, rate * sigmoid_r)
            # d root / d log a = -a^2 / root; 0 where a gate underflows and has no finite slope.
            by_root = grad * tl.where(square < TINY, 0.0, tl.rsqrt(square))
            by_gated = by_root * square
            by_square = by_root * sigmoid_i * values[step].to(tl.float32)
            by_i = by_square * square
            by_rate = sigmoid_r * (current * previous - a * (a * by_square))
            by_r = by_rate * (rate - rate * sigmoid_r) * (1 / LOG2_E)
            grad_rate += by_rate
            t = time + step
            store(grad_recurrence_gate + begin, first, t, num_steps, *columns, by_r)
            store(grad_input_gate + begin, first, t, num_steps, *columns, by_i - by_i * sigmoid_i)
            store(grad_x + begin, first, t, num_steps, *columns, by_gated * sigmoid_i)
    tl.store(grad_state + row * dim + channel, carried, mask=is_channel)
    grad_rate = slope * -SHARPNESS * tl.reduce(grad_rate, 0, add)[None, :]
    tl.store(grad_decay + row * dim + channel, grad_rate, mask=is_channel)
