"""`check_model`: the models of docs/contract_models.csv are judged as it says, and what cannot be judged is said."""

from __future__ import annotations

import copy
import csv
import math
import random
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.honest_models import DIM, HONEST, VOCAB, Gru, NestedLstm, RouterLoss, answering
from tests.support.leaks import BROKEN, HONEST_MODELS, PUBLIC, judge
from tests.support.models import DropoutModel
from tests.support.mutant_models import MUTANTS, DropState, Encoder
from trainer.lab.contracts import CHECKS, ContractError, check_model, soak
from trainer.lab.contracts.subject import copy_model
from trainer.lab.contracts.trial import NO_STATE
from trainer.model.protocol import ModelOutput

PAGE = Path(__file__).parents[3] / "docs" / "contract_models.csv"
LINES = {line.split(",")[0]: line for line in PAGE.read_text(encoding="utf-8").splitlines(keepends=True)[1:]}
ROWS = {row["model"]: row for row in csv.DictReader(PAGE.read_text(encoding="utf-8").splitlines())}
NAMES = [*BROKEN, *HONEST_MODELS]
FIRST = {row["by"]: name for name, row in reversed(ROWS.items())}.values()  # that these checks together convict
QUICK = {*FIRST, "single tokens round their gate", "learned start of None alone", *list(HONEST_MODELS)[::6]}
SENSITIVE = ("gru", "scan in log space", "experts", "counts in int64", "state in bf16", "transformer with dropout")


def slow_but(quick, cases):
    return [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] not in quick)) for each in cases]


def made(make, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


@pytest.mark.parametrize("name", slow_but(QUICK, [(name,) for name in NAMES]))
def test_a_model_has_the_verdict_of_the_table(name):
    """`make docs` writes the table anew."""
    assert judge(name) == LINES[name]


def test_the_table_convicts_every_broken_model_and_no_honest_one():
    assert list(ROWS) == NAMES
    assert (len(BROKEN), len(HONEST_MODELS)) == (104, 41)
    assert {ROWS[name]["verdict"] for name in BROKEN} == {"broken", "warning"}  # of a detached state
    assert {ROWS[name]["verdict"] for name in HONEST_MODELS} == {"held"}
    assert all("#" in case.source for case in PUBLIC.values())
    assert {case.twin for case in BROKEN.values()} <= set(HONEST_MODELS.values())


@pytest.mark.parametrize(
    ("name", "how"), slow_but(("gru", "experts"), product(SENSITIVE, ("", "bf16", "bf16 weights", "no float64")))
)
def test_an_honest_model_is_judged_fully_and_not_convicted_at_any_precision(name, how, monkeypatch):
    def refuse(subject):
        raise RuntimeError("no float64 here")

    if how == "no float64":
        monkeypatch.setattr("trainer.lab.contracts.subject.Subject.in_float64", refuse)
    dtype = torch.bfloat16 if how == "bf16 weights" else torch.float32
    model = made(HONEST[name]).to(dtype)
    report = check_model(model, vocab_size=VOCAB, seq_len=16, autocast=torch.bfloat16 if how == "bf16" else None)
    assert report.breaches == [], report
    if how in ("", "bf16"):
        held = {"forward", "purity", "causality", "isolation"}
        held |= {"carry"} if getattr(model, "state_width", 1) else set()
        assert {each.check for each in report.verdicts if each.status == "held"} >= held, report
    if name == "gru":  # nor does the precision hide a breach
        assert check_model(made(DropState).to(dtype), vocab_size=VOCAB)["carry"].status == "broken"


class StaticBuffer(Gru):
    """Returns views of one buffer, as a cache of static shape does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(16, DIM), persistent=False)

    def mix(self, x, state):
        x, end = super().mix(x, state)
        with torch.no_grad():
            self.cache[: len(x)] = end
        return x, self.cache[: len(x)]


def test_a_state_that_the_next_call_overwrites_convicts_nothing():
    report = check_model(made(StaticBuffer), vocab_size=VOCAB)
    assert report.breaches == [], report
    assert (report["isolation"].status, report["carry"].status) == ("held", "held"), report


class NoStateInFloat64(Gru):
    """A kernel for one dtype, which is called with a state alone."""

    def mix(self, x, state):
        if state.any() and x.dtype == torch.float64:
            raise RuntimeError('"kernel" not implemented for Double')
        return super().mix(x, state)


class ComputesInFloat32(Gru):
    """A kernel that takes float64 and computes in float32, unseen by torch's functions."""

    def mix(self, x, state):
        with torch._C.DisableTorchFunction():
            self.rnn.float()
            mixed, end = super().mix(x.float(), state)
            self.rnn.to(x.dtype)
        return mixed.to(x.dtype), end


@pytest.mark.parametrize("make", [NoStateInFloat64, ComputesInFloat32])
def test_a_forward_that_lacks_float64_is_not_taken_for_one_that_fails(make):
    report = check_model(made(make), vocab_size=VOCAB)
    assert not report.breaches, report
    assert report["carry"].status == "held"
    assert "judged in float32" in report.how


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (MUTANTS["raises later"], "boom in my model (tests/support/mutant_models.py:"),
        (answering(lambda found: found._replace(logits=found.logits[:4])), "it returns logits [4, 64, "),
    ],
)
def test_a_forward_that_fails_after_its_first_calls_is_told_from_a_wrong_interface(make, why):
    report = check_model(made(make), vocab_size=VOCAB)
    assert report["forward"].text.endswith("after it ran with tokens [1, 64]"), report
    assert why in report["forward"].text
    assert report["carry"].text == "forward fails"


def test_a_leak_between_many_rows_is_found_in_a_model_without_a_state_too():
    class Leaky(DropoutModel):
        def forward(self, tokens, state=None):
            inside = self.embedding(tokens).cumsum(1)  # over the row's own past
            if len(tokens) >= 5:
                inside = inside + inside.mean(0, keepdim=True)
            return ModelOutput(self.head(inside), None)

    breaches = check_model(Leaky(VOCAB, 8), vocab_size=VOCAB).breaches
    assert [each.check for each in breaches] == ["soak"]


@pytest.mark.parametrize("kind", ["Declared", "TakesNone", "Empty"])
def test_a_model_that_returns_no_state_on_purpose_is_not_convicted(kind):
    """It says so itself, takes none, or returns one of no numbers."""

    class Declared(NestedLstm):
        def forward(self, tokens, state=None):
            return SimpleNamespace(logits=super().forward(tokens).logits, state=None)

    class TakesNone(Declared):
        def forward(self, tokens, **_):
            return super().forward(tokens)

    class Empty(NestedLstm):
        def forward(self, tokens, state=None):
            logits = super().forward(tokens).logits
            return SimpleNamespace(logits=logits, state={"h": logits.new_zeros(len(tokens), 0)})

    model = made({"Declared": Declared, "TakesNone": TakesNone, "Empty": Empty}[kind])
    if kind == "Declared":
        model.state_width = 0
    report = check_model(model, vocab_size=VOCAB)
    assert report["carry"].text == NO_STATE
    assert report["carry"] not in report.unchecked


@pytest.mark.parametrize(
    ("batch_last", "why"), [(True, "its state cannot be kept: "), (False, "no state: RuntimeError: no")]
)
def test_a_state_whose_layout_cannot_be_found_is_a_wrong_interface(batch_last, why):
    class Odd(NestedLstm):
        def forward(self, tokens, state=None):
            if not batch_last:
                raise RuntimeError("no")
            output = super().forward(tokens, state)
            return SimpleNamespace(logits=output.logits, state=output.state["h"].t())

    verdict = check_model(made(Odd), vocab_size=VOCAB)["forward"]
    assert verdict.status == "broken"
    assert why in verdict.text


@pytest.mark.parametrize(("make", "with_resets"), [(NestedLstm, set()), (Encoder, {"resets"})])
def test_a_stateful_model_of_one_length_is_judged_as_far_as_that_goes(make, with_resets):
    def refuse_others(module, args, given):
        assert (args[0] if args else given["tokens"]).shape[1] == 48, "another length"

    model = made(make)
    model.register_forward_pre_hook(refuse_others, with_kwargs=True)
    report = check_model(model, vocab_size=VOCAB, seq_len=48)
    assert not report.breaches, report
    held = {"forward", "causality", "isolation", "purity", *with_resets}
    assert {verdict.check for verdict in report.verdicts if verdict.status == "held"} >= held, report
    assert "rows of 48 tokens and no longer ones" in report["carry"].text
    assert [verdict.check for verdict in report.unchecked] == ["carry"]


@pytest.mark.parametrize("make", [MUTANTS["batch norm"], MUTANTS["noise of numpy in eval"], NestedLstm])
def test_the_model_and_the_generators_are_left_alone(make):
    model = made(make).eval()
    has_width = hasattr(model, "state_width")
    model.head.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    check_model(model, vocab_size=VOCAB)
    assert not model.training
    assert hasattr(model, "state_width") == has_width
    assert not model._forward_pre_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.head.weight.requires_grad
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (dtype, grad)


class Needs(Gru):
    def forward(self, tokens, images, state=None):
        return super().forward(tokens, state)


@pytest.mark.parametrize(
    ("make", "why", "vocab_size"),
    [
        (answering(lambda found: found._replace(logits=found.logits * 0)), "same at every position", VOCAB),
        (answering(lambda found: found._replace(logits=found.logits * math.nan)), "not finite", VOCAB),
        (Needs, "needs images", VOCAB),
        (Gru, "only one token id", 1),
    ],
)
def test_what_cannot_be_judged_is_said_to_be_untestable_with_the_reason(make, why, vocab_size):
    report = check_model(made(make), vocab_size=vocab_size)
    assert report.breaches == []
    assert report["carry"].status == "not testable here"
    assert why in report["carry"].text
    assert report.unchecked[0].check == "causality"


def test_a_model_that_cannot_be_copied_is_not_tried():
    model = made(Gru)
    model.lock = threading.Lock()
    report = check_model(model, vocab_size=VOCAB)
    assert "the model cannot be copied: TypeError: " in report["carry"].text, report
    assert report.breaches == []


def test_a_model_that_has_run_is_judged_as_one_that_has_not():
    """Its tensors are copied as they are, at any depth; those that are the same stay so."""
    model = made(RouterLoss)
    model(torch.zeros(2, 5, dtype=torch.long))
    kept, router = model.losses, model.router
    report = check_model(model, vocab_size=VOCAB)
    assert {report[check].status for check in ("purity", "carry", "gradient")} == {"held"}, report
    assert model.losses is kept
    assert kept[0].requires_grad
    copied = copy_model(model, shares_parameters=True)
    assert copied.router is not router
    assert copied.router.weight is router.weight
    assert copied.losses[0] is copied.aux_loss
    assert not copied.aux_loss.requires_grad
    assert torch.equal(copied.losses[1][1], kept[1][1])


def test_without_time_short_rows_alone_are_judged(monkeypatch):
    monkeypatch.setattr(soak, "SECONDS", -1.0)
    monkeypatch.setattr(soak, "MOST_SECONDS", -1.0)
    report = check_model(made(Gru), vocab_size=VOCAB)
    assert "would take more than" in report["soak"].text
    assert report["carry"].text.startswith("on short rows")


@pytest.mark.parametrize(
    ("token_sec", "scope"),
    [(0.1, "16 rows, 6 cells of 64 tokens"), (0.17, "9 rows, 6 cells of 64"), (0.25, "16 rows, 6 cells of 32 tokens")],
)
def test_the_soak_looks_as_far_as_its_time_allows_and_says_how_far(token_sec, scope, monkeypatch):
    monkeypatch.setattr(soak, "SECONDS", 1e4)
    monkeypatch.setattr(soak, "_time_call", lambda trial, rows, length: token_sec * rows * length)
    report = check_model(made(Gru), vocab_size=VOCAB, rows=16)
    assert f"soak of {scope}" in report.summary()
    assert f"eval() in float64 ({scope}" in report["soak"].text.replace(", train() in float32", "")
    monkeypatch.setattr(soak, "MOST_LOGITS", 1)
    report = check_model(made(Gru), vocab_size=VOCAB, rows=16)
    assert "16 rows" not in report.summary()


def test_a_model_that_does_not_take_its_own_state_dict_breaks_purity():
    verdict = check_model(made(Gru), vocab_size=VOCAB, build=lambda: Gru(layers=2))["purity"]
    assert verdict.status == "broken"
    assert "built anew, it does not take its state_dict: RuntimeError: Error(s) in loading" in verdict.text


def test_raise_if_broken_lists_all_verdicts():
    check_model(made(Gru), vocab_size=VOCAB).raise_if_broken()
    with pytest.raises(ContractError, match="carry: broken: cells of 6 tokens differ") as error:
        check_model(made(DropState), vocab_size=VOCAB).raise_if_broken()
    assert all(check in str(error.value) for check in CHECKS)


def test_compiled_models_are_judged_like_others():
    inside = made(DropState)
    inside.head.compile()
    for compiled in (torch.compile(made(DropState)), inside):
        verdict = check_model(compiled, vocab_size=VOCAB)["carry"]
        assert (verdict.status, verdict.position) == ("broken", 6)


def test_the_package_needs_torch_alone():
    code = (
        "import sys, trainer.lab.contracts, trainer.lab.nested_state\n"
        "print(sorted({m.split('.')[1] for m in sys.modules if m.startswith('trainer.')}), 'pydantic' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert found.stdout.split() == ["['errors',", "'import_path',", "'lab',", "'model',", "'wording']", "False"]


def test_a_state_that_the_ledger_cannot_hold_is_refused_with_the_way_out():
    model = made(Gru)
    model.register_forward_hook(lambda module, args, output: output._replace(state=output.state.long()))
    assert "leave out state_width" in check_model(model, vocab_size=VOCAB)["forward"].text
