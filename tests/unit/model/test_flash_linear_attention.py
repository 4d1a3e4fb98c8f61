"""Rows, states and resets through operators of flash-linear-attention, against its own reference functions in plain torch."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.model.test_recurrence import rule_by_steps
from trainer.contracts import check_model
from trainer.errors import UserError
from trainer.extensions.flash_linear_attention import build_gated_delta, flash_gated_delta_rule, mixers, run_rows
from trainer.model.gated_delta import build, gated_delta_rule
from trainer.model.protocol import carry_flat

ROWS, LENGTH, HEADS, KEY, VALUE = 3, 24, 2, 16, 16
KINDS = {  # arguments of decays and rates beside q, k and v
    "gated_delta_rule": {"g": (), "beta": ()},
    "gla": {"gk": (KEY,)},
    "simple_gla": {"g": ()},
    "kda": {"g": (KEY,), "beta": ()},
}
RESETS = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
RESETS[0, [0, 7]] = RESETS[1, [1, 2, LENGTH - 1]] = True


def reference(kind: str):
    """The library's function for one sequence at a time, with `cu_seqlens` as its kernels take them."""
    module = pytest.importorskip(f"fla.ops.{kind}.naive")
    function = getattr(module, f"naive_recurrent_{kind}")

    def operator(*, initial_state: Tensor, cu_seqlens: Tensor | None = None, output_final_state: bool, **given):
        if cu_seqlens is None:
            return function(**given, initial_state=initial_state, output_final_state=output_final_state)
        inputs = {name: given.pop(name) for name in list(given) if isinstance(given[name], Tensor)}
        assert all(each.shape[:2] == (1, int(cu_seqlens[-1])) for each in inputs.values())
        found = [
            function(
                **{name: each[:, start:stop] for name, each in inputs.items()},
                **given,
                initial_state=initial_state[number, None],
                output_final_state=output_final_state,
            )
            for number, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
        ]
        return torch.cat([output for output, _ in found], 1), torch.cat([end for _, end in found])

    return operator


def refuses_gradients(device: torch.device) -> bool:
    """Whether fla itself refuses the gradients of its kernels, since this Triton miscompiles them on this device."""
    if device.type != "cuda":
        return False
    fla = pytest.importorskip("fla.ops.common.chunk_o")
    return fla.IS_NVIDIA_HOPPER and fla.TRITON_ABOVE_3_4_0 and not fla.TRITON_ABOVE_3_7_1


def operator_on(device: torch.device):
    """Its kernel on CUDA; its reference on the CPU."""
    if device.type == "cuda":
        return pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return reference("gated_delta_rule")


def drawn(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(3)
    inputs = {name: torch.randn(ROWS, LENGTH, HEADS, width) for name, width in (("q", KEY), ("k", KEY), ("v", VALUE))}
    inputs["k"] = F.normalize(inputs["k"], dim=-1)
    for name, shape in KINDS[kind].items():
        numbers = torch.rand(ROWS, LENGTH, HEADS, *shape)
        inputs[name] = numbers if name == "beta" else -numbers
    leaves = {name: each.requires_grad_() for name, each in inputs.items()}
    return leaves, torch.randn(ROWS, HEADS, KEY, VALUE).requires_grad_()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_that_continue_equal_their_documents_alone(kind):
    operator, (inputs, state) = reference(kind), drawn(kind)
    output, ends = run_rows(operator, inputs, state, RESETS)
    for row in range(ROWS):
        held, starts = state[row, None], [0, *RESETS[row].nonzero().flatten().tolist(), LENGTH]
        for start, stop in itertools.pairwise(starts):
            held = torch.zeros_like(held) if start < LENGTH and RESETS[row, start] else held
            if start == stop:
                continue
            piece = {name: each[row, None, start:stop] for name, each in inputs.items()}
            alone, held = run_rows(operator, piece, held)
            torch.testing.assert_close(output[row, None, start:stop], alone)
        torch.testing.assert_close(ends[row, None], held)
    ends.sum().backward()
    # Rows 0 and 1 end in another document than the one that their states began; row 2 has no reset.
    assert [float(each.abs().sum()) > 0 for each in state.grad] == [False, False, True]


@pytest.mark.cuda
@pytest.mark.parametrize("resets", [None, RESETS], ids=["one document", "several"])
def test_the_rule_its_states_and_gradients_are_those_of_torch(device, resets):
    if refuses_gradients(device):
        pytest.skip("fla refuses gradients on Hopper with Triton before 3.7.1")
    inputs, state = drawn("gated_delta_rule")
    arguments = [inputs[name].detach().transpose(1, 2) for name in ("q", "k", "v", "g", "beta")] + [state.detach()]
    marks = None if resets is None else resets.to(device)
    flash = functools.partial(flash_gated_delta_rule, operator=operator_on(device))
    found = []
    for rule in (flash, gated_delta_rule, rule_by_steps):
        given = [each.to(device).clone().requires_grad_() for each in arguments]
        output, end = rule(*given, marks)
        (output.sin().sum() + end.cos().sum()).backward()
        found.append([output, end, *(each.grad for each in given)])
    close = {"rtol": 1e-4, "atol": 1e-5} if device.type == "cpu" else {"rtol": 2e-2, "atol": 2e-2}  # TF32
    for one, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(one, other, **close)


@pytest.mark.cuda
def test_a_model_on_the_kernels_keeps_the_contract_and_equals_the_one_in_torch(device):
    torch.manual_seed(0)
    model = carry_flat(build(37, 32, 2, heads=2)).to(device)
    tokens, marks = torch.randint(37, (ROWS, LENGTH), device=device), RESETS.to(device)
    wanted = model(tokens=tokens, resets=marks)
    for mixer in mixers(model):
        mixer.rule = functools.partial(flash_gated_delta_rule, operator=operator_on(device))
    found = model(tokens=tokens, resets=marks)
    close = {} if device.type == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found.logits, wanted.logits, **close)
    torch.testing.assert_close(found.state, wanted.state, **close)
    if refuses_gradients(device):
        pytest.skip("the forward equals, and fla refuses gradients on Hopper with Triton before 3.7.1")
    report = check_model(model, vocab_size=37, seq_len=16)
    assert report.breaches == [], report
    assert {report[check].status for check in ("carry", "gradient", "resets", "isolation")} == {"held"}, report


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a device")
def test_without_a_device_it_says_that_its_kernels_need_one():
    with pytest.raises(UserError, match="need a CUDA device"):
        build_gated_delta(37, 32, 2)
