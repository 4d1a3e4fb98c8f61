"""`check_model`: all checks on one model; its interface, and its purity."""

from __future__ import annotations

import copy
import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.import_path import format_error, shown_path
from trainer.lab.contracts import short_rows, soak
from trainer.lab.contracts.adapted import adapt
from trainer.lab.contracts.subject import (
    MODES,
    CallFailed,
    NotTestable,
    Result,
    Subject,
    dtype_name,
    private_copy,
    seed_generators,
    shape_of,
    without_dropout,
)
from trainer.lab.contracts.trial import CHECKS, ROWS, Report, Trial, Verdict, make_trial, relative, untestable

RANDOM = (
    "in eval(), the same call gives another answer each time, by {:.1e} of the logits' spread: "
    "something random is active there, such as a dropout without training=self.training; "
    "pass that, or use nn.Dropout"
)


def check_model(
    model: nn.Module,
    *,
    vocab_size: int,  # token ids are below it
    seq_len: int = 64,  # tokens of a cell in training; most checks use shorter rows
    autocast: torch.dtype | None = None,  # in training; None: none
    rows: int = soak.LEAST_ROWS,  # of a batch in training; the soak takes `LEAST_ROWS` or more
    max_seconds: float = 60.0,
) -> Report:
    """Check that a model keeps the contract of `trainer.model.protocol.SequenceModel`.

    Runs on a copy, on the model's device: weights, mode, buffers and random generators are left as
    they are. Parts under `torch.compile` run uncompiled.

    `forward(tokens, state)` returns an object with `.logits` and `.state`; without an attribute
    `state_width` its state may be any nest of tensors [B, ...]. The soak takes at most as long as
    the other checks, or a few seconds; its verdict says what it tried. After `max_seconds` of the
    calling thread's own work no further check begins: those left are `not testable here`.
    """
    started = time.perf_counter()
    verdicts: dict[str, Verdict] = {}
    how, why = "nothing was run", "the time was up before it began"
    with _left_alone(model):
        try:
            request = _Request(vocab_size, seq_len, autocast, rows, time.thread_time(), max_seconds)
            how = _check(model, request, verdicts)
        except (CallFailed, NotTestable) as error:
            why = str(error)
            if verdicts:
                how = "nothing else was run"
    ordered = tuple(verdicts.get(check) or untestable(check, why) for check in CHECKS)
    return Report(ordered, how, time.perf_counter() - started)


class _Request(NamedTuple):
    """The arguments of `check_model`, and when it began, in the calling thread's time."""

    vocab_size: int
    seq_len: int
    autocast: torch.dtype | None
    rows: int
    began: float
    max_seconds: float

    def soak(self, trial: Trial, working: Subject) -> Verdict:
        """The last check, which may take as long as the others did, or `LEAST_SECONDS`."""
        now = time.thread_time()
        allowed = max(soak.LEAST_SECONDS, now - self.began)
        deadline = min(self.began + self.max_seconds, now + allowed)
        return soak.check_soak(trial, working, self.autocast, seq_len=self.seq_len, rows=self.rows, deadline=deadline)


def _check(model: nn.Module, request: _Request, verdicts: dict[str, Verdict]) -> str:
    """Fill in the verdicts. Returns the circumstances."""
    vocab_size, seq_len, autocast, *_ = request
    # Compiled, it would compile for minutes, once per shape.
    model = getattr(model, "_orig_mod", model)
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise NotTestable("the model has no weights (meta device)")
    try:
        model = adapt(model)
    except CallFailed as error:
        verdicts["forward"] = Verdict("forward", "broken", str(error))
        raise NotTestable("forward fails") from error
    with_resets = takes_resets(model)
    drawn = private_copy(model)
    given = next((p.dtype for p in drawn.parameters() if p.is_floating_point()), torch.float32)
    problem = _find_state(drawn, seq_len)
    working = Subject(without_dropout(drawn), dtype=given)
    live = Subject(drawn, dtype=given, autocast=autocast, is_live=True)
    in_training = working.with_autocast(autocast)
    problem = problem or _check_forward(in_training, vocab_size, seq_len, with_resets)
    if problem:
        verdicts["forward"] = Verdict("forward", "broken", problem)
        raise NotTestable("forward fails")
    verdicts["forward"] = Verdict("forward", "held", f"ran with tokens {[1, seq_len]}")
    if vocab_size < 2:  # no token could be changed
        raise NotTestable("a vocabulary of one token says nothing")
    options = {"vocab_size": vocab_size, "seq_len": seq_len, "takes_resets": with_resets}
    try:
        return _judge_exactly(working, live, options, request, verdicts)
    except CallFailed as error:
        text = f"{error}, after it ran with tokens {[1, seq_len]}"
        verdicts["forward"] = Verdict("forward", "broken", text)
        raise NotTestable("forward fails") from error


def _find_state(model: nn.Module, seq_len: int) -> str:
    """Give a model without `state_width` one, as the trainer does; why that fails, if it does."""
    if getattr(model, "state_width", None) is not None:
        return ""
    from trainer.lab.nested_state import carry_flat  # of such models alone

    try:
        carry_flat(model, lengths=(seq_len,))
    except UserError as error:
        return f"{error.problem}{_place_of_forward(model)}"
    except Exception as error:  # noqa: BLE001 - a user's model may raise anything
        text = format_error(error, otherwise=_place_of_forward(model))
        return f"its forward fails with a row of {seq_len} tokens and no state: {text}"
    return ""


def _check_forward(subject: Subject, vocab_size: int, seq_len: int, takes_resets: bool) -> str:
    """The problem of one row of the training length in either mode; empty if there is none."""
    width: int = subject.model.state_width  # type: ignore[assignment]
    tokens = (torch.arange(seq_len) % vocab_size)[None]
    given: dict[str, Any] = {"tokens": tokens.to(subject.device), "state": subject.zeros(1)}
    if takes_resets:
        given["resets"] = torch.zeros(1, seq_len, dtype=torch.bool, device=subject.device)
    for training, where in ((True, ""), (False, " in eval()")):
        model = subject.fresh().train(training)
        try:
            output = subject.forward(model, dict(given), with_grad=False)
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            text = format_error(error, otherwise=_place_of_forward(model))
            if width and subject.dtype in (torch.bfloat16, torch.float16):
                dtype = dtype_name(subject.ledger_dtype)
                text += f"; states are {dtype}, which the model has to cast"
            state = [1, width] if width else None
            inputs = f"tokens {list(tokens.shape)} and state {state}"
            return f"its forward fails{where} with {inputs}: {text}"
        problem = _mismatch(output, seq_len, vocab_size, width)
        problem = problem or _loss_mismatch(model, output, seq_len)
        if problem:
            return f"its forward returns{where} {problem}{_place_of_forward(model)}"
    return ""


def _mismatch(output: Any, length: int, vocab_size: int, width: int) -> str:
    """The problem of an output for one row; empty if there is none."""
    if not hasattr(output, "logits") or not hasattr(output, "state"):
        return f"a {type(output).__name__} without .logits and .state"
    logits, state = shape_of(output.logits), shape_of(output.state)
    # More columns than ids do no harm: some pad the vocabulary.
    has_rank = isinstance(logits, list) and len(logits) == 3
    if not has_rank or logits[:2] != [1, length] or logits[2] < vocab_size:
        return f"logits {logits} for tokens [1, {length}], not {[1, length, vocab_size]}"
    if width and state != [1, width]:
        return f"a state {state} for one row, not [1, {width}], its state_width"
    if width and not output.state.is_floating_point():
        dtype = dtype_name(output.state.dtype)
        return f"a state of {dtype}: leave out state_width, and it is carried exactly"
    return ""


def _loss_mismatch(model: nn.Module, output: Any, length: int) -> str:
    """The problem of the losses for one row; what they depend on may be anything."""
    losses = getattr(output, "losses", None) or {}
    if not hasattr(model, "loss_keys") and not losses:
        return ""
    from trainer.lab.auxiliary import declared_losses, loss_problem  # of such models alone

    return loss_problem(losses, declared_losses(model), (1, length), needs_all=model.training)


def _place_of_forward(model: nn.Module) -> str:
    """` (FILE:LINE)` of the model's `forward`; empty if it has none in Python."""
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    if code is None:
        return ""
    return f" ({shown_path(code.co_filename)}:{code.co_firstlineno})"


def takes_resets(model: nn.Module) -> bool:
    """Whether `forward` takes `resets`. Raises NotTestable: it needs inputs that are not known."""
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(model.forward).parameters
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind not in skipped]
    unknown = sorted({p.name for p in needed} - {"tokens", "state", "resets"})
    if unknown:
        raise NotTestable(f"forward needs {', '.join(unknown)}, which only the data have")
    return "resets" in parameters


def _judge_exactly(
    working: Subject, live: Subject, options: dict[str, Any], request: _Request, verdicts: dict[str, Verdict]
) -> str:
    """Judge in float64 if the model runs in it, otherwise in its own dtype; see `_judge`. Raises
    CallFailed: it fails in its own dtype, on rows like those that it took before."""
    try:
        trial = make_trial(working.in_float64(), **options)
    except (CallFailed, NotTestable, TypeError, RuntimeError):  # mps and some kernels lack float64
        trial = make_trial(working, **options)
    before = dict(verdicts)
    try:
        return _judge(trial, working, live, request, verdicts)
    except CallFailed:
        if trial.subject is working:
            raise
    # Some of its operators lack float64.
    verdicts.clear()
    verdicts.update(before)
    working.is_pure, working.training = False, True
    return _judge(make_trial(working, **options), working, live, request, verdicts)


def _judge(trial: Trial, working: Subject, live: Subject, request: _Request, verdicts: dict[str, Verdict]) -> str:
    """Make every check but `forward`; returns the circumstances."""
    for training in (True, False):
        with trial.in_mode(training):
            state = trial.start_state()
        # Infinities may mean something, as in log space; NaN no other check could compare.
        if state is not None and state.isnan().any():
            text = f"the returned state holds NaN in {MODES[training]}, and the next cell starts from it"
            verdicts["carry"] = Verdict("carry", "broken", text)
            raise NotTestable("the state is NaN")
    verdicts["purity"], trial = check_purity(trial, live)
    trial.facts["purity"] = verdicts["purity"].status
    if "random" in trial.facts:
        raise NotTestable("the model is random in eval() too")
    is_exact, low = trial.subject is not working, working.with_autocast(torch.bfloat16)
    checks: dict[str, Callable[[Trial], Verdict]] = {
        "causality": lambda trial: trial.judge("causality", short_rows.judge_causality),
        "isolation": lambda trial: trial.judge("isolation", short_rows.judge_isolation),
        "carry": short_rows.check_carry,
        "state_used": short_rows.check_state_used,
        "resets": short_rows.check_resets,
        "gradient": short_rows.check_gradient,
        "checkpointing": short_rows.check_checkpointing,
        "autocast": lambda trial: short_rows.check_precision(trial, low, "autocast", "bf16 autocast"),
        "soak": lambda trial: request.soak(trial, working),
    }
    for check, judge in checks.items():
        if time.thread_time() > request.began + request.max_seconds:  # the checks left are not testable
            break
        try:
            _require(check, verdicts, trial)
            verdict = judge(trial)
        except NotTestable as error:
            verdict = untestable(check, error)
        except CallFailed as error:
            if check != "resets" or is_exact:
                raise
            verdict = Verdict(check, "broken", f"{error}, with a reset inside a row")
        trial.facts[check] = verdict.status
        if check == "carry" and is_exact and verdict.status == "held":
            found = short_rows.check_precision(trial, working, "carry", dtype_name(working.dtype))
            if found.status == "broken":
                verdict = found
        verdicts[check] = verdict
    subject = trial.subject
    lengths = f"rows of {trial.length} tokens in cells of {trial.cell}"
    return f"judged in {dtype_name(subject.dtype)}, {lengths}, on {subject.device}"


def _require(check: str, verdicts: dict[str, Verdict], trial: Trial) -> None:
    """Raise `NotTestable` where the verdicts so far leave nothing to check."""
    found = verdicts.get("carry")
    if check in ("gradient", "autocast") and found is not None:
        if found.status == "broken":
            raise NotTestable("the state is not carried")
        if found.status == "not testable here" and trial.width:
            raise NotTestable(f"carry is not: {found.text}")
    broken = [name for name, verdict in verdicts.items() if verdict.status == "broken"]
    if check == "soak" and broken:
        raise NotTestable(f"{broken[0]} is broken")


def check_purity(trial: Trial, live: Subject) -> tuple[Verdict, Trial]:
    """Judge purity, and find the modes in which the other checks have to run.

    `live` is the model as it is, with its dropouts; the trial's has none. Returns the verdict, and
    the trial for the checks that follow: if the verdict allows it, they run on one copy of the
    model instead of a fresh one per call.
    """
    subject = trial.subject
    tokens, state = trial.tokens(), trial.start_state(ROWS)
    size, draws = _repeat_live(trial, live, tokens, state)
    if size:
        with trial.in_mode(False):
            # A functional dropout alone leaves the other checks possible: they switch it off.
            if not draws or subject.draws_random_numbers(tokens):
                trial.facts["random"] = True
        return Verdict("purity", "broken", RANDOM.format(size), size), trial
    kept, written = "", ""
    results: dict[bool, Result] = {}
    for training in (True, False):
        with trial.in_mode(training):
            model = subject.fresh()
            result, found = _with_writes(trial, tokens, state, model)
            written = written or found or _under_grad(trial, tokens, state, result)
            # The next call may write into a buffer of the model's own.
            result = results[training] = result._replace(state=copy.deepcopy(result.state))
            # Other tokens and another state: the same call again would write the same numbers.
            reversed_state = short_rows.ordered(state, [*reversed(range(ROWS))])
            subject(trial.others(tokens), reversed_state, on=model)
            kept, size = _again(trial, tokens, state, model, result)
        if kept:  # the other mode would only say it again
            break
    subject.is_pure = not kept  # from here on one copy serves all calls
    with trial.in_mode(True):
        is_random = subject.draws_random_numbers(tokens)
    note = ""
    modes: tuple[bool, ...] = (True,)
    if is_random:
        note = " (judged in eval(): in train() the model draws random numbers beside dropout)"
        modes = (False,)
    elif not kept and not torch.equal(results[True].logits, results[False].logits):
        modes = (True, False)
    trial = replace(trial, modes=modes, mode_note=note)
    if kept or written:
        return Verdict("purity", "broken", kept or written, size or None), trial
    text = f"the same call twice gives the same answer, in train() as in eval(){note}"
    return Verdict("purity", "held", text), trial


def _repeat_live(trial: Trial, live: Subject, tokens: Tensor, state: Tensor | None) -> tuple[float, bool]:
    """How far two calls in eval() differ (0.0: by rounding alone), and whether numbers were drawn.

    Each call is on a copy of its own, so that what a module keeps from call to call is no reason to
    differ; the generators are not reseeded between the two. Calls of one shape give the same bits;
    where nothing was drawn from torch's generators, a device may still add in another order.
    """
    live.training = False
    if state is not None:
        state = state.to(live.ledger_dtype)
    seed_generators()
    before = live.generator_state()
    first = live(tokens, state)
    second = live(tokens, state)
    draws = not torch.equal(before, live.generator_state())
    size = _difference(trial, second, first)
    if not draws and size <= torch.finfo(live.autocast or live.dtype).eps ** 0.5:
        size = 0.0
    return size, draws


def _again(trial: Trial, tokens: Tensor, state: Tensor | None, model: nn.Module, first: Result) -> tuple[str, float]:
    """Whether the same object, which ran another call in between, answers the same call alike."""
    size = _difference(trial, trial.subject(tokens, state, on=model), first)
    if size <= max(64 * trial.noise, 1e-12):
        return "", size
    mode = MODES[trial.subject.training]
    text = f"the same call gives another answer after another call in between, by {size:.1e}, in {mode}: "
    cause = "the module keeps something of its own from call to call, which the ledger cannot see"
    return text + cause, size


def _with_writes(trial: Trial, tokens: Tensor, state: Tensor | None, model: nn.Module) -> tuple[Result, str]:
    """A call's result, and which of its arguments the forward writes into."""
    subject = trial.subject
    given_tokens, given = tokens.to(subject.device, copy=True), copy.deepcopy(state)
    result = subject(given_tokens, given, on=model, copies=False)
    text = "forward writes into {}, in place; compute a new tensor instead"
    if given is not None and state is not None and not torch.equal(given, state):
        return result, text.format("the incoming state")
    if not torch.equal(given_tokens.cpu(), tokens):
        return result, text.format("tokens")
    return result, ""


def _under_grad(trial: Trial, tokens: Tensor, state: Tensor | None, wanted: Result) -> str:
    """How a call with gradients enabled differs from one without; empty if it does not."""
    logits, end = trial.subject(tokens, state, with_grad=True, on=trial.subject.fresh())
    if isinstance(end, Tensor):
        end = end.detach()
    size = _difference(trial, Result(logits.detach().double(), end), wanted)
    if size <= max(64 * trial.noise, trial.noise**0.5):  # another way to compute the same
        return ""
    text = "forward gives another answer with gradients enabled than under torch.no_grad()"
    return f"in {MODES[trial.subject.training]}, {text}, by {size:.1e}"


def _difference(trial: Trial, found: Result, wanted: Result) -> float:
    size = float(trial.errors(found.logits, wanted.logits).max())
    if found.state is not None and wanted.state is not None:
        states = found.state.double(), wanted.state.double()
        unit = float(states[1].nan_to_num(0, 0, 0).square().mean().sqrt()) or 1.0
        size = max(size, float(relative(*states, unit).max()))
    return size


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Restore the random generators; run compiled parts uncompiled."""
    devices = {tensor.device.index for tensor in model.parameters() if tensor.is_cuda}
    numpy = sys.modules.get("numpy")
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices)))
        stack.callback(random.setstate, random.getstate())
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        # Importing the compiler takes seconds; without it nothing is compiled.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
