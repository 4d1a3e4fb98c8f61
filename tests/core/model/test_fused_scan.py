"""The fused gated scan against float64 step by step, and against the plain scan that it replaces on CUDA."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.core.model.test_recurrence import step_by_step
from tests.support.kernels import DEVICE
from trainer.model import encoder, recurrence
from trainer.model.recurrence import SEGMENTS, STEPS, fused_scan, gated_scan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, where infinities are meant
]

TILE = SEGMENTS * STEPS
SLOW = [(1, 1, 1), (2, 5, 3), (1, TILE - 1, 33), (2, TILE, 32), (1, 3 * TILE + 7, 5)]
SHAPES = [(3, 2, 70), (1, TILE + 1, 31), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in SLOW)]


class Inputs(NamedTuple):
    """The arguments of the scan."""

    r: Tensor
    i: Tensor
    x: Tensor
    decay: Tensor
    resets: Tensor | None
    state: Tensor

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """With a change to each but the resets."""
        return Inputs(*(x if x is None or x.dtype == torch.bool else change(x) for x in self))

    def leaves(self) -> Inputs:
        """New leaves of the graph."""
        return self.mapped(lambda x: x.detach().clone().requires_grad_())

    def differentiable(self) -> tuple[Tensor, ...]:
        """All but the resets."""
        return self.r, self.i, self.x, self.decay, self.state

    def times(self, part: slice, state: Tensor) -> Inputs:
        """A part of the row from another state."""
        resets = None if self.resets is None else self.resets[:, part]
        return Inputs(self.r[:, part], self.i[:, part], self.x[:, part], self.decay, resets, state)


def make(batch: int, num_steps: int, dim: int, *, dtype: torch.dtype = torch.float32, share: float = 0.1) -> Inputs:
    """Random inputs, `share` of whose positions are resets, on the device."""
    draw = torch.Generator().manual_seed(1000 * num_steps + dim)
    r, i, x = (2.0 * torch.randn(3, batch, num_steps, dim, generator=draw)).to(dtype).unbind(0)
    decay = 3.0 * torch.randn(dim, generator=draw) - 3.0
    resets = torch.rand(batch, num_steps, generator=draw) < share if share else None
    found = Inputs(r, i, x, decay, resets, torch.randn(batch, dim, generator=draw))
    return Inputs(*(x if x is None else x.to(DEVICE) for x in found))


def plain_scan(*inputs: Any) -> tuple[Tensor, Tensor]:
    """What the kernels replace."""
    with patch.object(recurrence, "KERNEL_DTYPES", ()):
        return gated_scan(*inputs)


def results(scan: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs) -> list[Tensor]:
    """h, the final state and the gradients of r, i, x, decay and state, for fixed gradients of both outputs."""
    leaves = inputs.leaves()
    h, final = scan(*leaves)
    draw = torch.Generator().manual_seed(7)
    grads = [torch.randn(x.shape, generator=draw).to(inputs.x.dtype).to(x) for x in (h, final)]
    return [h.detach(), final.detach(), *torch.autograd.grad((h, final), leaves.differentiable(), grads)]


NAMES = ("h", "final state", "grad r", "grad i", "grad x", "grad decay", "grad state")


# A device's exp2 and rsqrt are approximate.
ROUNDING = 2.0**-19 if DEVICE == "cpu" else 2.0**-18


def assert_accurate(inputs: Inputs, rounding: float = ROUNDING) -> None:
    """Within a few roundings, relative to the largest value, of float64; or as close to it as the plain scan is."""
    truth = results(step_by_step, inputs.mapped(Tensor.double))
    found, plain = results(fused_scan, inputs), results(plain_scan, inputs)
    for name, got, other, true in zip(NAMES, found, plain, truth, strict=True):
        assert got.dtype == other.dtype, name
        error, plain_error = ((x.double() - true).abs().max().item() for x in (got, other))
        bound = max(2 * plain_error, rounding * max(true.abs().max().item(), 1e-3))
        assert error <= bound, f"{name}: off by {error:.3g}, the plain scan by {plain_error:.3g}"


@pytest.mark.parametrize("share", [0.0, 0.1], ids=["no resets", "resets"])
@pytest.mark.parametrize(("batch", "num_steps", "dim"), SHAPES)
def test_states_and_gradients_equal_float64(batch: int, num_steps: int, dim: int, share: float) -> None:
    assert_accurate(make(batch, num_steps, dim, share=share))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_16_bit_inputs_give_16_bit_states_and_gradients_and_a_float32_final_state(dtype: torch.dtype) -> None:
    inputs = make(1, TILE + 9, 5, dtype=dtype)
    inputs = inputs._replace(state=inputs.state.to(dtype))
    assert_accurate(inputs, rounding=torch.finfo(dtype).eps)
    h, final, *_ = results(fused_scan, inputs)
    assert h.dtype == dtype
    # Only what is returned is rounded: the carried state is as exact as with float32 inputs.
    exact = step_by_step(*inputs.mapped(Tensor.double))[1]
    torch.testing.assert_close(final.double(), exact, rtol=1e-5, atol=1e-6)


def test_no_value_and_no_gradient_passes_a_reset() -> None:
    inputs = make(1, TILE + 6, 3, share=0.0)
    resets = torch.zeros(1, TILE + 6, dtype=torch.bool, device=DEVICE)
    resets[:, 9] = True
    huge = inputs._replace(resets=resets, state=torch.full_like(inputs.state, 1e30)).leaves()
    h, _ = fused_scan(*huge)
    grads = torch.autograd.grad(h[:, 9:].sum(), huge.differentiable())
    assert h[:, 9:].abs().max() < 1e3
    assert all((grad[:, :9] == 0).all() for grad in grads[:3])
    assert (grads[4] == 0).all()
    # The input at a reset counts in full, as in the plain scan.
    alone, _ = plain_scan(*inputs.times(slice(9, 10), torch.zeros_like(inputs.state)))
    torch.testing.assert_close(h[:, 9], alone[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("gate", "decay"), [(-200.0, 0.0), (200.0, 50.0), (200.0, -200.0)], ids=["a=1", "a=0", "flat"])
def test_saturated_gates_equal_the_plain_scan(gate: float, decay: float) -> None:
    inputs = make(1, 11, 4)
    inputs = inputs._replace(r=torch.full_like(inputs.r, gate), decay=torch.full_like(inputs.decay, decay))
    found = results(fused_scan, inputs)
    assert all(torch.isfinite(x).all() for x in found)
    torch.testing.assert_close(found, results(plain_scan, inputs), rtol=1e-5, atol=1e-6)


def test_input_scale_is_accurate_from_a_decay_of_almost_one_to_almost_zero() -> None:
    """With both gates open, x = 1 and no state, h is `sqrt(1 - a^2)` for `log a = -8 softplus(Lambda)`."""
    log_a = torch.logspace(-12, math.log10(50.0), 70, dtype=torch.float64)
    decay = torch.log(torch.expm1(log_a / 8.0)).float().to(DEVICE)
    open_gate = torch.full((1, 1, 70), 100.0, device=DEVICE)
    inputs = Inputs(open_gate, open_gate, torch.ones_like(open_gate), decay, None, torch.zeros(1, 70, device=DEVICE))
    leaves, exact = inputs.leaves(), inputs.mapped(Tensor.double).leaves()
    h, true = fused_scan(*leaves)[0], step_by_step(*exact)[0]
    torch.testing.assert_close(h.double(), true, rtol=3e-6, atol=0.0)
    slope, true_slope = torch.autograd.grad(h.sum(), leaves.decay)[0], torch.autograd.grad(true.sum(), exact.decay)[0]
    torch.testing.assert_close(slope.double(), true_slope, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("cut", [1, TILE, *(pytest.param(TILE + n, marks=pytest.mark.slow) for n in (-1, 1, 8))])
def test_a_row_cut_anywhere_gives_the_same_states(cut: int) -> None:
    inputs = make(2, TILE + 9, 5)
    whole, final = fused_scan(*inputs)
    first, carried = fused_scan(*inputs.times(slice(0, cut), inputs.state))
    second, last = fused_scan(*inputs.times(slice(cut, None), carried))
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(last, final, rtol=2e-6, atol=2e-6)


def test_non_contiguous_inputs() -> None:
    inputs = make(2, 13, 6)
    strided = inputs._replace(
        r=inputs.r.transpose(0, 1).contiguous().transpose(0, 1),
        i=torch.cat([inputs.i, inputs.i], dim=2)[:, :, :6],
        x=inputs.x[:, :1].expand(2, 13, 6),
        resets=torch.stack([inputs.resets, inputs.resets], dim=2)[:, :, 0],
        state=inputs.state[:1].expand(2, 6),
    )
    assert not any(x.is_contiguous() for x in (strided.r, strided.i, strided.x, strided.resets, strided.state))
    found, expected = fused_scan(*strided), fused_scan(*strided.mapped(Tensor.contiguous))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    fused, plain = inputs.leaves(), inputs.leaves()
    grads = [  # of a gradient of h that is expanded
        torch.autograd.grad(scan(*leaves)[0].sum(), leaves.differentiable())
        for scan, leaves in ((fused_scan, fused), (plain_scan, plain))
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


def test_results_repeat_bit_for_bit_and_rows_do_not_see_each_other() -> None:
    inputs = make(3, TILE + 2, 5)
    first = results(fused_scan, inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, results(fused_scan, inputs), strict=True))
    broken = inputs._replace(x=inputs.x.clone())
    broken.x[1, 7, 3] = math.nan
    rows = [0, 2]
    h, final, *grads = results(fused_scan, broken)
    for found, expected in zip((h, final, *grads[:3], grads[4]), (*first[:5], first[6]), strict=True):
        assert torch.equal(found[rows], expected[rows])
    assert h[1, 7:, 3].isnan().any()
    alone = fused_scan(*Inputs(*(x if x.dim() == 1 else x[2:] for x in inputs)))
    assert torch.equal(alone[0], first[0][2:])
    assert torch.equal(alone[1], first[1][2:])


@pytest.mark.slow
def test_operator_passes_opcheck() -> None:
    arguments = make(2, 3, 3).leaves()
    torch.library.opcheck(torch.ops.trainer.gated_scan.default, tuple(arguments))


@pytest.mark.parametrize("how", ["autocast", "checkpoint", "compile"])
def test_the_layer_runs_on_the_kernels(how: str) -> None:
    torch.manual_seed(0)
    layer = encoder.GatedRecurrence(6)
    layer.init_weights(1.0)
    layer = layer.to(DEVICE)
    x = torch.randn(2, 9, 6, device=DEVICE)
    resets = torch.rand(2, 9, device=DEVICE) < 0.2

    def run(mix: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=how == "autocast"):
            y, state = mix(x, torch.zeros(2, 6, device=DEVICE), resets)
        assert state.dtype == torch.float32
        return [y, state, *torch.autograd.grad(y.float().sum() + state.sum(), list(layer.parameters()))]

    fused: Callable[..., tuple[Tensor, Tensor]] = layer
    if how == "checkpoint":
        fused = lambda *args: checkpoint(layer, *args, use_reentrant=False)  # noqa: E731
    elif how == "compile":
        fused = torch.compile(layer, backend="aot_eager", fullgraph=True)
    tolerance = 2e-2 if how == "autocast" else 1e-5
    layer.scan = plain_scan
    expected = run(layer)
    layer.scan = fused_scan
    torch.testing.assert_close(run(fused), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "is_fused"), [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)])
def test_cuda_tensors_take_the_kernels_unless_they_are_float64(
    dtype: torch.dtype, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(recurrence, "fused_scan", lambda *args: taken.append("fused") or fused_scan(*args))
    monkeypatch.setattr(recurrence, "_scan_op", lambda a, b, *_: taken.append("plain") or b.cpu())
    with FakeTensorMode():
        x = torch.empty(2, 5, 3, dtype=dtype, device="cuda")
        args = (x, x, x, torch.empty(3, device="cuda"), None, torch.empty(2, 3, device="cuda"))
        h, final = gated_scan(*args)
    assert taken == ["fused" if is_fused else "plain"]
    assert (h.shape, h.dtype, final.shape) == (x.shape, dtype, (2, 3))


def test_a_cpu_takes_the_plain_scan_bit_for_bit_and_does_not_load_the_kernels() -> None:
    inputs = Inputs(*(x.cpu() for x in make(2, 9, 3, dtype=torch.bfloat16)))
    found, expected = gated_scan(*inputs), plain_scan(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    code = "import sys, trainer.model; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
