"""`check_model`: all checks on one model."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from trainer.contracts.carry import (
    check_carry,
    check_checkpointing,
    check_gradient,
    check_precision,
    check_state_used,
)
from trainer.contracts.forward import check_forward, check_purity, find_state, takes_resets
from trainer.contracts.report import CHECKS, FAILED_LATER, Report, Verdict
from trainer.contracts.rows import check_causality, check_isolation, check_resets
from trainer.contracts.subject import CallFailed, NotTestable, Subject, private_copy, uncompiled, without_dropout
from trainer.contracts.trial import Trial, make_trial

DTYPE_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check_model(
    model: nn.Module,
    *,
    vocab_size: int,
    seq_len: int = 64,
    pieces: Sequence[int] = (),
    autocast: torch.dtype | None = None,
    max_seconds: float = 60.0,
) -> Report:
    """Check that a model keeps the contract of `trainer.model.protocol.SequenceModel`.

    Runs on a copy, on the model's device: its weights, mode, buffers and the random generators are left as they are. Parts
    under `torch.compile` run uncompiled.

    Args:
        model: `forward(tokens, state)` returns an object with `.logits` and `.state`. Without an attribute `state_width` its
            state may be any nest of tensors [B, ...], whose layout is found as `trainer.model.state_layout` finds it.
        vocab_size: token ids are below it.
        seq_len: tokens of a cell in training. Only `forward` and models that take no other length use rows of it.
        pieces: other lengths of rows that training has (burn-in), for `forward`.
        autocast: dtype of autocast in training; None: none.
        max_seconds: of the calling thread's own work, however busy the machine is. No further check begins after it; those left
            are `not testable here`.
    """
    started = time.perf_counter()
    verdicts: dict[str, Verdict] = {}
    how = "nothing was run"
    with _left_alone(model):
        try:
            how = _check(model, vocab_size, (seq_len, *pieces), autocast, time.thread_time() + max_seconds, verdicts)
        except (CallFailed, NotTestable) as error:
            how = "nothing else was run" if verdicts else how
            _fill(verdicts, str(error))
    ordered = tuple(verdicts[check] for check in CHECKS)
    return Report(ordered, how, time.perf_counter() - started)


def _check(
    model: nn.Module,
    vocab_size: int,
    lengths: Sequence[int],
    autocast: torch.dtype | None,
    deadline: float,
    verdicts: dict[str, Verdict],
) -> str:
    """Fill in the verdicts; returns the circumstances."""
    model = uncompiled(model)
    with_resets = takes_resets(model)
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise NotTestable("the model has no weights (meta device)")
    drawn = private_copy(model)
    given = next((p.dtype for p in drawn.parameters() if p.is_floating_point()), torch.float32)
    if (problem := find_state(drawn, lengths[0])) is not None:
        verdicts["forward"] = problem
        raise NotTestable("forward fails")
    working = Subject(without_dropout(drawn), dtype=given)
    live = Subject(drawn, dtype=given, autocast=autocast, is_live=True)
    for length in dict.fromkeys(lengths):
        verdicts["forward"] = check_forward(working.with_autocast(autocast), vocab_size, length, with_resets)
        if verdicts["forward"].status != "held":
            raise NotTestable("forward fails")
    if vocab_size < 2:
        raise NotTestable("a vocabulary of one token says nothing")
    options: dict[str, Any] = {"vocab_size": vocab_size, "seq_len": lengths[0], "takes_resets": with_resets}
    try:
        return _judge_exactly(working, live, options, deadline, verdicts)
    except CallFailed as error:
        text = f"{error}{FAILED_LATER} with tokens {[1, lengths[0]]}"
        verdicts["forward"] = Verdict("forward", "broken", text)
        raise NotTestable("forward fails") from error


def _judge_exactly(
    working: Subject, live: Subject, options: dict[str, Any], deadline: float, verdicts: dict[str, Verdict]
) -> str:
    """Judge in float64 if the model runs in it, in its own dtype otherwise; returns the circumstances.

    Raises:
        CallFailed: it fails in its own dtype, on rows like those that it took before.
    """
    trial = _exact_trial(working, **options)
    if trial.subject is not working:
        found = dict(verdicts)
        try:
            return _judge(trial, working, live, deadline, found)
        except CallFailed:  # some of its operators may lack float64
            found = dict(verdicts)
            working.is_pure, working.training = False, True
            trial = make_trial(working, **options)
        finally:
            verdicts.update(found)
    return _judge(trial, working, live, deadline, verdicts)


def _judge(trial: Trial, working: Subject, live: Subject, deadline: float, verdicts: dict[str, Verdict]) -> str:
    """Make every check but `forward`; returns the circumstances."""
    if (nan := _nan_state(trial)) is not None:
        verdicts["carry"] = nan
        raise NotTestable("the state is NaN")
    verdicts["purity"], trial = check_purity(trial, live)
    if "random" in trial.facts:
        raise NotTestable("the model is random in eval() too")
    has_state, own = trial.width > 0, DTYPE_NAMES.get(working.dtype, str(working.dtype))
    low = working.with_autocast(torch.bfloat16)

    def second(check: str, subject: Subject, name: str) -> Verdict:
        return check_precision(trial, subject, check=check, name=name)

    checks: dict[str, Callable[[], Verdict]] = {
        "causality": lambda: check_causality(trial),
        "isolation": lambda: check_isolation(trial),
        "carry": lambda: check_carry(trial),
        "state_used": lambda: check_state_used(trial),
        "resets": lambda: check_resets(trial),
        "gradient": lambda: _after_carry(verdicts, lambda: check_gradient(trial), has_state=has_state),
        "checkpointing": lambda: check_checkpointing(trial),
        "autocast": lambda: _after_carry(
            verdicts, lambda: second("autocast", low, "bf16 autocast"), has_state=has_state, check="autocast"
        ),
    }
    for check, judge in checks.items():
        if time.thread_time() > deadline:
            _fill(verdicts, "the time was up before it began")
            break
        try:
            verdicts[check] = judge()
        except NotTestable as error:
            verdicts[check] = Verdict(check, "not testable here", str(error))
        except CallFailed as error:
            if check != "resets" or trial.subject is not working:
                raise
            verdicts[check] = Verdict(check, "broken", f"{error}, with a reset inside a row")
        trial.facts[check] = verdicts[check].status
        if check == "carry" and trial.subject is not working and verdicts[check].status == "held":
            found = second("carry", working, own)
            if found.status == "broken":
                verdicts[check] = found
    precision = DTYPE_NAMES.get(trial.subject.dtype, str(trial.subject.dtype))
    return f"judged in {precision}, rows of {trial.length} tokens in cells of {trial.cell}, on {trial.subject.device}"


def _nan_state(trial: Trial) -> Verdict | None:
    """A verdict on states of NaN, which no other check could compare. Infinities may mean something, as in log space."""
    for training in (True, False):
        with trial.in_mode(training):
            state = trial.start_state()
        if state is not None and state.isnan().any():
            text = (
                f"the returned state holds NaN in {'train' if training else 'eval'}(), and the next cell starts from it"
            )
            return Verdict("carry", "broken", text)
    return None


def _after_carry(
    verdicts: dict[str, Verdict], judge: Callable[[], Verdict], *, has_state: bool, check: str = "gradient"
) -> Verdict:
    """A judgement that presumes that the state is carried."""
    carry = verdicts["carry"]
    if carry.status == "broken":
        return Verdict(check, "not testable here", "the state is not carried")
    if carry.status == "not testable here" and has_state:
        return Verdict(check, "not testable here", f"carry is not: {carry.text}")
    return judge()


def _exact_trial(working: Subject, vocab_size: int, seq_len: int, takes_resets: bool) -> Trial:
    """In float64 if the model runs in it, in its own dtype otherwise."""
    options: dict[str, Any] = {"vocab_size": vocab_size, "seq_len": seq_len, "takes_resets": takes_resets}
    try:
        return make_trial(working.in_float64(), **options)
    except (CallFailed, NotTestable, TypeError, RuntimeError):  # mps has no float64, kernels may not either
        return make_trial(working, **options)


def _fill(verdicts: dict[str, Verdict], why: str) -> None:
    for check in CHECKS:
        verdicts.setdefault(check, Verdict(check, "not testable here", why))


def _run_eagerly() -> AbstractContextManager[Any]:
    """Run compiled parts uncompiled. Nothing is compiled where the compiler was never imported, which takes seconds."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Restore the random generators; run compiled parts uncompiled."""
    devices = {tensor.device.index for tensor in model.parameters() if tensor.is_cuda}
    python = random.getstate()
    library = sys.modules.get("numpy")
    numpy_state = library.random.get_state() if library is not None else None
    try:
        with torch.random.fork_rng(devices=sorted(devices)), _run_eagerly():
            yield
    finally:
        random.setstate(python)
        if library is not None:
            library.random.set_state(numpy_state)
