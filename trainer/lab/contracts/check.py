"""`check_model`: all checks on one model; its interface, its purity, and what short rows say where
the soak does not hold.

Short rows name the cause. Carry: a row read in cells equals the row read whole. Leaks: other rows
(isolation), later tokens (causality), documents before a reset (resets).
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.import_path import format_error, shown_path
from trainer.lab.contracts.soak import LEAST_ROWS, soak
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
from trainer.lab.contracts.trial import (
    CHECKS,
    NO_STATE,
    ROWS,
    Report,
    Trial,
    Verdict,
    make_trial,
    relative,
    untestable,
)

RANDOM = (
    "in eval(), the same call gives another answer each time, by {:.1e} of the logits' spread: "
    "something random is active there, such as a dropout without training=self.training; "
    "pass that, or use nn.Dropout"
)
RETURNS_NONE = (
    "forward takes a state and returns none, so every cell starts from zero: return "
    "ModelOutput(..., state=...), or set state_width = 0 on a model without a state"
)
LEARNED_START = (
    "The trainer begins every group with zeros: a start that None alone has, such as a learned one, "
    "is never used and never trained (docs/contracts.md)"
)

LEAST_NOISE = 1e-3  # of the logits' spread: rounding that hides too much on a short row


def check_model(
    model: nn.Module,
    *,
    vocab_size: int,  # token ids are below it
    seq_len: int = 64,  # tokens of a cell in training
    autocast: torch.dtype | None = None,  # in training; None: none
    rows: int = LEAST_ROWS,  # of a batch in training; the soak takes `LEAST_ROWS` or more
    max_seconds: float = 60.0,
) -> Report:
    """Check that a model keeps the contract of `trainer.model.protocol.SequenceModel`.

    Runs on a copy, on the model's device: weights, mode, buffers and random generators are left as
    they are. Parts under `torch.compile` run uncompiled.

    `forward(tokens, state)` returns an object with `.logits` and `.state`; without an attribute
    `state_width` its state may be any nest of tensors [B, ...]. The soak's verdict says what it
    tried; one that would take longer than `max_seconds`, in the calling thread, is not begun.
    """
    started = time.perf_counter()
    verdicts: dict[str, Verdict] = {}
    how, why = "nothing was run", ""
    with _left_alone(model):
        try:
            how = _check(
                model,
                _Request(vocab_size, seq_len, autocast, rows, time.thread_time() + max_seconds),
                verdicts,
            )
        except (CallFailed, NotTestable) as error:
            why = str(error)
            if verdicts:
                how = "nothing else was run"
    ordered = tuple(verdicts.get(check) or untestable(check, why) for check in CHECKS)
    return Report(ordered, how, time.perf_counter() - started)


class _Request(NamedTuple):
    """The arguments of `check_model`, and when its time ends, in that of the calling thread."""

    vocab_size: int
    seq_len: int
    autocast: torch.dtype | None
    rows: int
    deadline: float


def _check(model: nn.Module, request: _Request, verdicts: dict[str, Verdict]) -> str:
    """Fill in the verdicts. Returns the circumstances."""
    vocab_size, seq_len, autocast, *_ = request
    # Compiled, it would compile for minutes, once per shape.
    model = getattr(model, "_orig_mod", model)
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise NotTestable("the model has no weights (meta device)")
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
    if with_resets:
        tokens = torch.zeros(1, seq_len, dtype=torch.long)
        try:
            in_training(tokens, working.zeros(1), torch.arange(seq_len)[None] == seq_len // 2)
        except CallFailed as error:
            verdicts["resets"] = Verdict("resets", "broken", f"{error}, with a reset inside a row")
            with_resets = False
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "seq_len": seq_len,
        "takes_resets": with_resets,
    }
    before = dict(verdicts)
    try:
        return _judge(make_trial(working.in_float64(), **options), working, live, request, verdicts)
    except (CallFailed, NotTestable, TypeError, RuntimeError):
        pass  # mps and some operators lack float64
    verdicts.clear()
    verdicts.update(before)
    working.is_pure, working.training = False, True
    try:
        return _judge(make_trial(working, **options), working, live, request, verdicts)
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
        raise NotTestable(f"forward needs {', '.join(unknown)}, beside tokens, state and resets")
    return "resets" in parameters


def _judge(trial: Trial, working: Subject, live: Subject, request: _Request, verdicts: dict[str, Verdict]) -> str:
    """Make every check but `forward`; returns the circumstances. Raises CallFailed: a forward fails."""
    subject = trial.subject
    lengths = f"rows of {trial.length} tokens in cells of {trial.cell}"
    how = f"judged in {dtype_name(subject.dtype)}, {lengths}, on {subject.device}"
    for training in (True, False):
        with trial.in_mode(training):
            state = trial.start_state()
        # Infinities may mean something, as in log space; NaN no other check could compare.
        if state is not None and state.isnan().any():
            text = f"the returned state holds NaN in {MODES[training]}, and the next cell starts from it"
            verdicts["carry"] = Verdict("carry", "broken", text)
            return _without_the_rest(verdicts, "the state is NaN", how)
    size, draws = _repeat_live(trial, live, state)
    if size:
        verdicts["purity"] = Verdict("purity", "broken", RANDOM.format(size), size)
        with trial.in_mode(False):
            # A functional dropout alone leaves the other checks possible: they switch it off.
            if not draws or subject.draws_random_numbers(trial.tokens()):
                return _without_the_rest(verdicts, "the model is random in eval() too", how)
    else:
        verdicts["purity"], trial = check_purity(trial)
    seconds = request.deadline - time.thread_time()
    found, look_in = soak(
        trial,
        working,
        request.autocast,
        seq_len=request.seq_len,
        rows=request.rows,
        seconds=seconds,
    )
    if look_in is not None and seconds > 0:
        with trial.in_mode(look_in):
            found |= find_causes(trial)
    broken = [check for check, verdict in found.items() if verdict.status == "broken" and check != "soak"]
    if broken and found["soak"].status == "broken":
        found["soak"] = untestable("soak", f"{broken[0]} is broken")
    if not trial.takes_resets:
        found["resets"] = untestable("resets", "forward takes no resets")
    if (of_state := _check_state(trial)) is not None:
        found["carry"] = of_state
    verdicts.update(found | verdicts)
    return how


def _without_the_rest(verdicts: dict[str, Verdict], why: str, how: str) -> str:
    verdicts.update({check: untestable(check, why) for check in CHECKS if check not in verdicts})
    return how


def _check_state(trial: Trial) -> Verdict | None:
    """What `carry` says of a model without a state, of one that takes one length alone, and of the
    start of a row; None: nothing."""
    subject, model = trial.subject, trial.subject.model
    if not trial.width:
        # `carry_flat` found no state in what forward returned.
        if hasattr(model, "state_layout") and "state" in inspect.signature(model.forward).parameters:
            return Verdict("carry", "broken", RETURNS_NONE)
        return untestable("carry", NO_STATE)
    if not trial.takes_cells:
        text = f"the model takes rows of {trial.cell} tokens and no longer ones"
        return untestable("carry", f"{text}, which its cells could be compared with")
    tokens = trial.tokens()
    try:
        size = float(trial.errors(subject(tokens, None).logits, subject(tokens, subject.zeros(ROWS)).logits).max())
        if size > math.sqrt(trial.noise):
            text = f"state=None and zeros give other logits, by {size:.1e} of their spread. {LEARNED_START}"
            return Verdict("carry", "broken", text, size)
    except CallFailed:  # a model need not take None
        pass
    return None


def check_purity(trial: Trial) -> tuple[Verdict, Trial]:
    """Judge purity. Returns the verdict, and the trial for the checks that follow: if the verdict
    allows it, they run on one copy of the model instead of a fresh one per call."""
    subject = trial.subject
    tokens, state, zeros = trial.tokens(), trial.start_state(), subject.zeros(ROWS)
    kept, written, size = "", "", 0.0
    for training in (True, False):
        with trial.in_mode(training):
            model, start = subject.fresh(), subject(tokens, zeros, on=subject.fresh())
            result, found = _with_writes(trial, tokens, state, model)
            written = written or found
            # The next call may write into a buffer of the model's own.
            result = result._replace(state=copy.deepcopy(result.state))
            # Other tokens and another state: the same call again would write the same numbers.
            subject(trial.others(tokens), None if state is None else state.flip(0), on=model)
            for given, wanted in ((state, result), (zeros, start)):
                size = max(size, _difference(trial, subject(tokens, given, on=model), wanted))
        if size > max(64 * trial.noise, 1e-12):
            kept = (
                f"the same call gives another answer after another call in between, by {size:.1e}, in "
                f"{MODES[training]}: the module keeps something of its own from call to call, which the ledger cannot see"
            )
            break  # the other mode would only say it again
    subject.is_pure = not kept  # from here on one copy serves all calls
    with trial.in_mode(True):
        is_random = subject.draws_random_numbers(tokens)
    if is_random:
        trial = replace(trial, trains=False)
    if kept or written:
        return Verdict("purity", "broken", kept or written, size or None), trial
    return Verdict("purity", "held", "the same call twice gives the same answer, in train() as in eval()"), trial


def _repeat_live(trial: Trial, live: Subject, state: Tensor | None) -> tuple[float, bool]:
    """How far two calls in eval() differ (0.0: by rounding alone), and whether numbers were drawn.

    `live` is the model with its dropouts; the trial's has none. Each call is on a copy of its own,
    so that what a module keeps from call to call is no reason to differ; the generators are not
    reseeded between the two. Calls of one shape give the same bits; where nothing was drawn from
    torch's generators, a device may still add in another order.
    """
    live.training = False
    if state is not None:
        state = state.to(live.ledger_dtype)
    seed_generators()
    before = live.generator_state()
    first, second = (live(trial.tokens(), state) for _ in range(2))
    draws = not torch.equal(before, live.generator_state())
    size = _difference(trial, second, first)
    if not draws and size <= torch.finfo(live.precision).eps ** 0.5:
        size = 0.0
    return size, draws


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


def _difference(trial: Trial, found: Result, wanted: Result) -> float:
    size = float(trial.errors(found.logits, wanted.logits).max())
    if found.state is not None and wanted.state is not None:
        states = found.state.double(), wanted.state.double()
        unit = float(states[1].nan_to_num(0, 0, 0).square().mean().sqrt()) or 1.0
        size = max(size, float(relative(*states, unit).max()))
    return size


def find_causes(trial: Trial) -> dict[str, Verdict]:
    """The verdicts on isolation, causality, carry and resets. Raises CallFailed: a forward fails."""
    if trial.noise > LEAST_NOISE:
        why = f"one rounding moves the logits by {trial.noise:.1e} of their spread"
        return {check: untestable(check, why) for check in ("isolation", "causality", "carry", "resets")}
    found = {"isolation": _judge_isolation(trial), "causality": _judge_causality(trial)}
    try:
        found["carry"] = _judge_carry(trial)
    except NotTestable as error:
        found["carry"] = untestable("carry", error)
    if trial.takes_resets:
        found["resets"] = _judge_resets(trial)
    return found


def _judge_isolation(trial: Trial) -> Verdict:
    """Change the other row: a row's logits and state must not change."""
    subject, tokens, state = trial.subject, trial.tokens(), trial.start_state()
    before, others, largest = (
        subject(tokens, state),
        trial.others(tokens),
        torch.zeros(trial.length),
    )
    for row in range(ROWS):  # rows may come first or last where something runs out
        changed = others.clone()
        changed[row] = tokens[row]
        after = subject(changed, state)
        errors = trial.errors(after.logits, before.logits)[row]
        if after.state is not None and before.state is not None:
            own, other = after.state[row].double(), before.state[row].double()
            errors[-1] = errors[-1].maximum(relative(own, other, float(other.square().mean().sqrt()) or 1.0))
        largest = largest.maximum(errors.cpu())
    text = "changing the other rows moves the logits or the state of a row by {1:.1e}, from position {0} on"
    return _verdict(trial, "isolation", largest, text)


def _judge_causality(trial: Trial) -> Verdict:
    """Change the tokens of the last half of a row: logits before it must not change."""
    subject, tokens, half = trial.subject, trial.tokens(1), trial.length // 2
    changed = tokens.clone()
    changed[:, half:] = trial.others(tokens)[:, half:]
    before, after = (subject(each, subject.zeros(1)).logits for each in (tokens, changed))
    text = f"changing the tokens from position {half} on moves the logits at position {{}} by {{:.1e}}"
    return _verdict(trial, "causality", trial.errors(after, before)[0, :half], text)


def _judge_carry(trial: Trial) -> Verdict:
    """Raises NotTestable: results depend on the length of a row."""
    subject, n, tokens = trial.subject, trial.cell, trial.tokens()
    whole = subject(tokens, subject.zeros(ROWS)).logits
    state, pieces = subject.zeros(ROWS), []
    for piece in torch.split(tokens, n, dim=1):
        result = subject(piece, state)
        pieces.append(result.logits)
        state = subject.carried(result.state)
    errors = trial.errors(torch.cat(pieces, dim=1), whole).amax(0)  # [T]
    # The first cell starts where the row starts: if it differs, the state is not why.
    if (size := float(errors[:n].max())) > math.sqrt(trial.noise):
        text = f"the first cell, before any cut, differs from the uncut row by {size:.1e} already"
        causes = "the length of the row (later tokens, batch statistics, expert capacity)"
        raise NotTestable(f"{text}: results depend on {causes}")
    text = f"cells of {n} tokens differ from the uncut row from position {{}} on"
    text += f", by {{:.1e}} of the logits' spread (rounding: {trial.noise:.0e})"
    return _verdict(trial, "carry", errors, text)


def _judge_resets(trial: Trial) -> Verdict:
    """Change the tokens before a reset: logits after it must not change."""
    subject, tokens, at = trial.subject, trial.tokens(), trial.length // 3 + 1
    resets = torch.zeros(ROWS, trial.length, dtype=torch.bool)
    resets[:, at] = True
    changed = tokens.clone()
    changed[:, :at] = trial.others(tokens)[:, :at]
    before = subject(tokens, trial.start_state(), resets).logits
    after = subject(changed, subject.zeros(ROWS), resets).logits
    text = f"the document before the reset at position {at} moves the logits {{}} positions after it by {{:.1e}}"
    return _verdict(trial, "resets", trial.errors(after, before).amax(0)[at:], text)


def _verdict(trial: Trial, check: str, errors: Tensor, text: str) -> Verdict:
    """Of errors [T]; broken above half way, in orders of magnitude, from rounding to the spread of
    the logits. `text` is filled with the first position that is wrong, and the largest error."""
    size, limit = float(errors.max()), math.sqrt(trial.noise)
    if size <= limit:
        return Verdict(check, "held", f"on short rows, to {size:.1e}", size)
    first = int((errors > limit).nonzero()[0])
    return Verdict(check, "broken", text.format(first, size), size, first)


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
