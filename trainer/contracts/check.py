"""`check_model`: all checks on one model."""

from __future__ import annotations

import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.contracts.carry import check_carry, check_state_used
from trainer.contracts.gradient import check_checkpointing, check_gradient
from trainer.contracts.precision import check_precision
from trainer.contracts.purity import check_purity
from trainer.contracts.report import CHECKS, Report, Verdict
from trainer.contracts.rows import check_causality, check_isolation, check_resets
from trainer.contracts.subject import CallFailed, Subject, private_copy, uncompiled, without_dropout
from trainer.contracts.trial import NotTestable, Trial, make_trial
from trainer.import_path import format_error, shown_path

KNOWN_INPUTS = frozenset({"tokens", "state", "resets"})
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
        model: `forward(tokens, state)` returns an object with `.logits` and `.state`; `state_width` is its attribute.
        vocab_size: token ids are below it.
        seq_len: tokens of a cell in training. Only `forward` and models that take no other length use rows of it.
        pieces: other lengths of rows that training has (burn-in), for `forward`.
        autocast: dtype of autocast in training; None: none.
        max_seconds: no further check begins after this time; those left are `not testable here`.
    """
    started = time.perf_counter()
    verdicts: dict[str, Verdict] = {}
    how = "nothing was run"
    with _left_alone(model):
        try:
            how = _check(model, vocab_size, (seq_len, *pieces), autocast, started + max_seconds, verdicts)
        except (CallFailed, NotTestable) as error:
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
    takes_resets = _takes_resets(model)
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise NotTestable("the model has no weights (meta device)")
    drawn = private_copy(model)
    given = next((p.dtype for p in drawn.parameters() if p.is_floating_point()), torch.float32)
    working = Subject(without_dropout(drawn), dtype=given)
    live = Subject(drawn, dtype=given, autocast=autocast, is_live=True)
    for length in dict.fromkeys(lengths):
        verdicts["forward"] = check_forward(working.with_autocast(autocast), vocab_size, length, takes_resets)
        if verdicts["forward"].status != "held":
            raise NotTestable("forward fails")
    if vocab_size < 2:
        raise NotTestable("a vocabulary of one token says nothing")
    trial = _exact_trial(working, vocab_size, lengths[0], takes_resets)
    verdicts["purity"], trial = check_purity(trial, live)
    if "random" in trial.facts:
        raise NotTestable("the model is random in eval() too")
    is_exact = trial.subject is not working

    def second(check: str, subject: Subject, name: str) -> Verdict:
        return check_precision(trial, subject, check=check, name=name)

    low = working.with_autocast(torch.bfloat16)
    checks: dict[str, Callable[[], Verdict]] = {
        "causality": lambda: check_causality(trial),
        "isolation": lambda: check_isolation(trial),
        "carry": lambda: check_carry(trial),
        "state_used": lambda: check_state_used(trial),
        "resets": lambda: check_resets(trial),
        "gradient": lambda: _after_carry(verdicts, lambda: check_gradient(trial), has_state=trial.width > 0),
        "checkpointing": lambda: check_checkpointing(trial),
        "autocast": lambda: _after_carry(
            verdicts, lambda: second("autocast", low, "bf16 autocast"), has_state=trial.width > 0, check="autocast"
        ),
    }
    for check, judge in checks.items():
        if time.perf_counter() > deadline:
            _fill(verdicts, "the time was up before it began")
            break
        try:
            verdicts[check] = judge()
        except (CallFailed, NotTestable) as error:
            verdicts[check] = Verdict(check, "not testable here", str(error))
        trial.facts[check] = verdicts[check].status
        if check == "carry" and is_exact and verdicts[check].status == "held":
            found = second("carry", working, DTYPE_NAMES.get(given, str(given)))
            if found.status == "broken":
                verdicts[check] = found
    precision = DTYPE_NAMES.get(trial.subject.dtype, str(trial.subject.dtype))
    return f"judged in {precision}, rows of {trial.length} tokens in cells of {trial.cell}, on {trial.subject.device}"


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


def check_forward(subject: Subject, vocab_size: int, seq_len: int, takes_resets: bool) -> Verdict:
    """One row of the training length, and the shapes that come back."""
    width: int = subject.model.state_width  # type: ignore[assignment]
    tokens = (torch.arange(seq_len) % vocab_size)[None]
    resets = torch.zeros(1, seq_len, dtype=torch.bool) if takes_resets else None
    shape = "None" if not width else [1, width]
    model = subject.fresh().train(subject.training)
    try:
        given: dict[str, Any] = {"tokens": tokens.to(subject.device), "state": subject.zeros(1)}
        if resets is not None:
            given["resets"] = resets.to(subject.device)
        output = subject.forward(model, given, with_grad=False)
    except Exception as error:  # noqa: BLE001 - a user's model may raise anything
        text = format_error(error, otherwise=place_of_forward(model))
        text = f"its forward fails with tokens {list(tokens.shape)} and state {shape}: {text}"
        return Verdict("forward", "broken", text)
    problem = _mismatch(output, seq_len, vocab_size, width)
    if problem:
        return Verdict("forward", "broken", f"{problem}{place_of_forward(model)}")
    return Verdict("forward", "held", f"ran with tokens {list(tokens.shape)}")


def _mismatch(output: Any, length: int, vocab_size: int, width: int) -> str:
    """What is wrong with a forward's output for one row; empty if nothing is."""
    if not hasattr(output, "logits") or not hasattr(output, "state"):
        return f"its forward returns a {type(output).__name__} without .logits and .state"
    logits, state = output.logits, output.state
    wanted = [1, length, vocab_size]
    shape = list(logits.shape) if isinstance(logits, Tensor) else None
    # More columns than ids do no harm: some pad the vocabulary.
    if shape is None or shape[:2] != wanted[:2] or len(shape) != len(wanted) or shape[2] < vocab_size:
        text = type(logits).__name__ if shape is None else shape
        return f"its forward returns logits {text} for tokens [1, {length}], not {wanted}"
    found = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
    if width and found != [1, width]:
        return f"its forward returns a state {found} for one row, not [1, {width}], its state_width"
    return ""


def place_of_forward(model: nn.Module) -> str:
    """` (FILE:LINE)` of the model's `forward`; empty if it has none in Python."""
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    return "" if code is None else f" ({shown_path(code.co_filename)}:{code.co_firstlineno})"


def _takes_resets(model: nn.Module) -> bool:
    """Whether `forward` takes `resets`.

    Raises:
        NotTestable: it needs inputs that are not known here.
    """
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(model.forward).parameters
    required = {p.name for p in parameters.values() if p.default is inspect.Parameter.empty and p.kind not in skipped}
    if unknown := sorted(required - KNOWN_INPUTS):
        raise NotTestable(f"forward needs {', '.join(unknown)}, which only the data have")
    return "resets" in parameters


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
