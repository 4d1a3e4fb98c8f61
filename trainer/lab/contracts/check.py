"""`check_model`: all checks on one model; its interface, its purity, and what short rows say where
the soak does not hold.

Short rows name the cause. Carry: a row read in cells equals the row read whole. Leaks: other rows
(isolation), later tokens (causality), documents before a reset (resets).
"""

from __future__ import annotations

import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import UserError, relative_paths
from trainer.import_path import format_error
from trainer.lab.contracts.soak import LEAST_ROWS, find_size, soak
from trainer.lab.contracts.subject import (
    MODES,
    CallFailed,
    NotTestable,
    Result,
    Subject,
    dtype_name,
    one_line,
    private_copy,
    seed_generators,
)
from trainer.lab.contracts.trial import (
    CHECKS,
    NO_STATE,
    ROWS,
    Report,
    Request,
    Trial,
    Verdict,
    make_trial,
    relative,
    untestable,
)
from trainer.model.protocol import extras_of
from trainer.wording import metrics_problem

RANDOM = (
    "the same call in eval() gives another answer each time, by {:.1e} of the logits' spread: is there "
    "a dropout without training=self.training?"
)
UNSAVED = (
    "built anew, with the same state_dict, it gives other logits in eval(), by {:.1e} of their "
    "spread, which need something that the state_dict does not hold (a buffer with persistent=False?)"
)
KEEPS = (
    "the same call gives another answer after another call in between, by {:.1e}, in {}: the module "
    "keeps something from call to call, which the ledger cannot see"
)
RETURNS_NONE = (
    "forward takes a state and returns none, so every cell starts from zero: return "
    "ModelOutput(..., state=...), or set state_width = 0"
)
OWN_START = (
    "state=None and zeros give other logits, by {:.1e} of their spread: groups begin with zeros, so a "
    "start that None alone has is never trained (docs/contracts.md)"
)


def check_model(
    model: nn.Module,
    *,
    vocab_size: int,  # token ids are below it
    build: Callable[[], nn.Module] | None = None,  # makes such a model anew, at random
    seq_len: int = 64,  # tokens of a cell in training
    autocast: torch.dtype | None = None,  # in training; None: none
    rows: int = LEAST_ROWS,  # of a batch in training; the soak takes `LEAST_ROWS` or more
    resets: bool | None = None,  # whether rows hold any in training; None: if forward names them
) -> Report:
    """Check that a model keeps the contract of `trainer.model.protocol.SequenceModel`.

    Runs on a copy, on the model's device: weights, mode, buffers and random generators are left as
    they are. Parts under `torch.compile` run uncompiled.

    Without an attribute `state_width` the state may be any nest of tensors [B, ...]. The soak's
    verdict says what it tried; one that would take long is not begun.
    """
    started, verdicts = time.perf_counter(), dict[str, Verdict]()
    if resets is None:
        resets = "resets" in inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    request = Request(vocab_size, seq_len, autocast, rows, build, resets)
    how, why = "nothing was run", ""
    with _left_alone(model):
        try:
            how = _check(model, request, verdicts)
        except CallFailed as error:
            verdicts["forward"], why = Verdict("forward", "broken", str(error)), "forward fails"
        except NotTestable as error:
            why = str(error)
    if why and verdicts:
        how = "nothing else was run"
    ordered = tuple(verdicts.get(check) or untestable(check, why) for check in CHECKS)
    return Report(ordered, how, time.perf_counter() - started)


def _check(model: nn.Module, request: Request, verdicts: dict[str, Verdict]) -> str:
    """Fill in the verdicts. Returns the circumstances. Raises CallFailed: the forward is broken;
    NotTestable: it needs unknown inputs, or cannot be judged."""
    seq_len = request.seq_len
    # Compiled, it would compile for minutes, once per shape.
    model = getattr(model, "_orig_mod", model)
    if unknown := needed_inputs(model) - {"tokens", "resets"}:
        text = f"forward needs {', '.join(sorted(unknown))}, and only tokens, state and resets are known"
        raise NotTestable(f"{text} here: train check --config judges it on the first batch of its data")
    model = private_copy(model)
    given = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    _find_state(model, seq_len)
    working = Subject(model, request.vocab_size, given)
    _check_forward(replace(working, autocast=request.autocast), request)
    verdicts["forward"] = Verdict("forward", "held", f"ran with tokens {[1, seq_len]}")
    try:
        return _judge(make_trial(working.in_float64(), request), working, verdicts)
    except (CallFailed, NotTestable, TypeError, RuntimeError):
        verdicts.pop("purity", None)  # some operators lack float64
    try:
        return _judge(make_trial(working, request), working, verdicts)
    except CallFailed as error:
        raise CallFailed(f"{error}, after it ran with tokens {[1, seq_len]}") from error


def _find_state(model: nn.Module, seq_len: int) -> None:
    """Give a model without `state_width` one, as the trainer does. Raises CallFailed."""
    if getattr(model, "state_width", None) is not None:
        return
    from trainer.lab.nested_state import carry_flat  # of such models alone

    try:
        carry_flat(model, seq_len=seq_len)
    except UserError as error:
        raise CallFailed(f"{error.problem}{_place_of_forward(model)}") from error
    except Exception as error:  # a user's model may raise anything
        text = format_error(error, otherwise=_place_of_forward(model))
        raise CallFailed(f"its forward fails with a row of {seq_len} tokens and no state: {text}") from error


def _check_forward(subject: Subject, request: Request) -> None:
    """One row of the training length in either mode. Raises CallFailed: the forward is broken."""
    width, length = subject.width, request.seq_len
    tokens = (torch.arange(length) % request.vocab_size)[None]
    given: dict[str, Any] = {"tokens": tokens.to(subject.device), "state": subject.zeros(1)}
    if request.resets:
        given["resets"] = (torch.arange(length, device=subject.device) == length // 2)[None]
    for training, where in ((True, ""), (False, " in eval()")):
        model = subject.fresh().train(training)
        try:
            output = subject.forward(model, dict(given))
        except Exception as error:  # a user's model may raise anything
            text = format_error(error, otherwise=_place_of_forward(model))
            state = [1, width] if width else None
            inputs = f"tokens {[1, length]} and state {state}" + ", and a reset within the row" * request.resets
            raise CallFailed(f"its forward fails{where} with {inputs}: {text}") from error
        problem = subject.mismatch(output, tokens) or _mismatch_of_extras(model, output, length)
        if problem:
            raise CallFailed(f"its forward returns{where} {problem}{_place_of_forward(model)}")


def _mismatch_of_extras(model: nn.Module, output: Any, length: int) -> str:
    """The problem of losses and metrics for one row; what they depend on may be anything."""
    losses, metrics = extras_of(output)
    problem = metrics_problem(metrics)
    if problem or (not hasattr(model, "loss_keys") and losses == {}):
        return problem
    from trainer.lab.auxiliary import declared_losses, loss_problem  # of such models alone

    return loss_problem(losses, declared_losses(model), (1, length), needs_all=model.training)


def _place_of_forward(model: nn.Module) -> str:
    """` (FILE:LINE)` of the model's `forward`; empty if it has none in Python."""
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    if code is None:
        return ""
    return relative_paths(f" ({code.co_filename}:{code.co_firstlineno})")


def needed_inputs(model: nn.Module) -> set[str]:
    """Names without which `model.forward` cannot be called, in addition to the state."""
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in skipped} - {"state"}


def _judge(trial: Trial, working: Subject, verdicts: dict[str, Verdict]) -> str:
    """Make every check but `forward`; returns the circumstances. Raises CallFailed: a forward fails;
    NotTestable: it is random in eval()."""
    live = replace(working, autocast=trial.request.autocast, is_plain=False, training=False)
    if noise := _repeat(trial, live):
        verdicts["purity"] = Verdict("purity", "broken", RANDOM.format(noise), noise)
        raise NotTestable("the model is random in eval()")
    verdicts["purity"], trial = check_purity(trial)
    if verdicts["purity"].status == "held":
        verdicts["purity"] = _find_unsaved(trial, working) or verdicts["purity"]
    subject = trial.subject
    how = f"judged in {dtype_name(subject.dtype)}, rows of {trial.length} tokens "
    how += f"in cells of {trial.cell}"
    try:
        size = find_size(trial)
        how += f", soak of {size}"
        found, look_in = soak(trial, working, size)
    except NotTestable as error:
        found, look_in = {check: untestable(check, error) for check in CHECKS}, subject.training
    if look_in is not None:
        found |= find_causes(trial.in_mode(look_in))
    if not trial.request.resets:
        found["resets"] = untestable("resets", "no row holds resets")
    found["carry"] = _check_state(trial) or found["carry"]
    causes = [check for check, verdict in found.items() if verdict.status == "broken" and check != "soak"]
    if found["soak"].status == "broken" and causes:
        found["soak"] = untestable("soak", f"{causes[0]} is broken")
    verdicts.update(found | verdicts)  # earlier verdicts hold
    return f"{how}, on {subject.device}"


def _check_state(trial: Trial) -> Verdict | None:
    """What `carry` says before rows are cut: of the state, row lengths and start; None: nothing."""
    subject, model = trial.subject, trial.subject.model
    if not subject.width:
        # `carry_flat` found no state in what forward returned.
        if getattr(model, "state_layout", model) is None and "state" in inspect.signature(model.forward).parameters:
            return Verdict("carry", "broken", RETURNS_NONE)
        return untestable("carry", NO_STATE)
    if not trial.takes_cells:
        text = f"the model takes rows of {trial.cell} tokens and no longer ones"
        return untestable("carry", f"{text}, which its cells could be compared with")
    tokens = trial.tokens()
    try:
        found, wanted = subject(tokens, None), subject(tokens, subject.zeros(ROWS))
    except CallFailed:  # a model need not take None
        return None
    size = float(trial.errors(found.logits, wanted.logits).max())
    if size <= trial.rounding.limit:
        return None
    return Verdict("carry", "broken", OWN_START.format(size), size)


def check_purity(trial: Trial) -> tuple[Verdict, Trial]:
    """Judge purity. Returns the verdict, and the trial for the checks that follow: if the verdict
    allows it, they run on one copy of the model instead of a fresh one per call."""
    tokens, zeros, written = trial.tokens(), trial.subject.zeros(ROWS), ""
    for training in (True, False):
        trial_here = trial.in_mode(training)
        subject, state = trial_here.subject, trial_here.start_state()
        kept = replace(subject, model=subject.fresh(), is_pure=True)
        start, result = subject(tokens, zeros), kept(tokens, state)
        written = written or result.written
        if trial.request.resets:
            written = written or subject(tokens, state, tokens % 2 == 0).written
        # Other tokens and another state: the same call again would write the same numbers.
        kept(trial.others(tokens), None if state is None else state.flip(0))
        pairs = ((kept(tokens, state), result), (kept(tokens, zeros), start))
        if size := max(_beyond_rounding(trial, subject, *pair) for pair in pairs):
            return Verdict("purity", "broken", KEEPS.format(size, MODES[training]), size), trial
    # From here on one copy serves all calls; random in training, it is judged in eval().
    is_random = _repeat(trial, trial.subject) > 0
    trial = replace(trial, subject=replace(trial.subject, is_pure=True, training=not is_random))
    if written:
        text = f"forward writes into {written}, in place; compute a new tensor instead"
        return Verdict("purity", "broken", text), trial
    text = "the same call twice gives the same answer, in train() as in eval()"
    return Verdict("purity", "held", text), trial


def _repeat(trial: Trial, subject: Subject) -> float:
    """How far two calls that draw random numbers differ; 0.0 if by rounding alone. Each call
    is on a copy of its own, so that what a module keeps is no reason to differ."""
    subject, state = replace(subject, is_seeded=False, is_pure=False), trial.start_state()
    seed_generators()
    return _beyond_rounding(trial, subject, *(subject(trial.tokens(), state) for _ in range(2)))


def _find_unsaved(trial: Trial, working: Subject) -> Verdict | None:
    """The breach of a model that its state_dict does not determine; None: there is none."""
    if trial.request.build is None:
        return None
    seed_generators()
    model = trial.request.build().to(working.device)
    model = private_copy(getattr(model, "_orig_mod", model))
    _find_state(model, trial.request.seq_len)
    try:
        model.load_state_dict(working.model.state_dict())
    except Exception as error:  # noqa: BLE001 - hooks of the user's own may raise anything
        return Verdict("purity", "broken", f"built anew, it does not take its state_dict: {one_line(error)}")
    own, tokens, state = replace(working, training=False), trial.tokens(), trial.start_state()
    found = replace(own, model=model)(tokens, state)
    size = _beyond_rounding(trial, own, found, own(tokens, state))
    return Verdict("purity", "broken", UNSAVED.format(size), size) if size else None


def _beyond_rounding(trial: Trial, subject: Subject, found: Result, wanted: Result) -> float:
    """How far two results of a subject differ; 0.0 if by rounding alone."""
    size = float(trial.errors(found.logits, wanted.logits).max())
    if found.state is not None and wanted.state is not None:
        size = max(size, float(_apart(found.state, wanted.state).max()))
    return size if size > torch.finfo(subject.precision).eps ** 0.5 else 0.0


def _apart(found: Tensor, wanted: Tensor) -> Tensor:
    """The difference of states [..., width], in units of the second."""
    unit = float(wanted.double().nan_to_num(0, 0, 0).square().mean().sqrt()) or 1.0
    return relative(found, wanted, unit)


def find_causes(trial: Trial) -> dict[str, Verdict]:
    """The verdicts of short rows. Raises CallFailed: a forward fails."""
    subject, n, noise = trial.subject, trial.cell, trial.rounding.noise
    if trial.rounding.horizon < trial.length:
        why = f"one rounding moves the logits by {noise:.1e} of their spread"
        return {check: untestable(check, why) for check in ("isolation", "causality", "carry", "resets")}
    tokens, state, zeros = trial.tokens(), trial.start_state(), subject.zeros(ROWS)
    others, whole, found = trial.others(tokens), subject(tokens, zeros).logits, dict[str, Verdict]()

    def judge(check: str, errors: Tensor, text: str) -> None:
        """Of errors [B, T]; `text` takes the first wrong position, and the largest error."""
        size, wrong = float(errors.max()), (errors.amax(0) > trial.rounding.limit).nonzero()
        found[check] = Verdict(check, "held", f"on short rows, to {size:.1e}", size)
        if len(wrong):
            first = int(wrong[0])
            found[check] = Verdict(check, "broken", text.format(first, size), size, first)

    before, largest = subject(tokens, state), list[Tensor]()
    for row in range(ROWS):  # rows may come first or last where something runs out
        changed = others.clone()
        changed[row] = tokens[row]
        after = subject(changed, state)
        largest.append(trial.errors(after.logits, before.logits)[row])
        if after.state is not None and before.state is not None:
            largest[-1][-1] = largest[-1][-1].maximum(_apart(after.state[row], before.state[row]))
    text = "changing the other rows moves the logits or the state of a row by {1:.1e}"
    judge("isolation", torch.stack(largest), f"{text}, from position {{0}} on")

    half, one = trial.length // 2, tokens[:1]  # alone: other rows are judged by isolation
    changed = torch.cat([one[:, :half], others[:1, half:]], dim=1)
    own, other = (subject(each, subject.zeros(1)).logits for each in (one, changed))
    text = f"changing the tokens from position {half} on moves the logits at position"
    judge("causality", trial.errors(other, own)[:, :half], f"{text} {{}} by {{:.1e}}")

    pieces, held = list[Tensor](), zeros
    for piece in torch.split(tokens, n, dim=1):
        logits, held, _ = subject(piece, held)
        pieces.append(logits)
    errors = trial.errors(torch.cat(pieces, dim=1), whole)
    text = f"cells of {n} tokens differ from the uncut row from position {{}} on"
    judge("carry", errors, f"{text}, by {{:.1e}} of the logits' spread (rounding: {noise:.0e})")
    # The first cell starts where the row starts: if it differs, the state is not why.
    if (size := float(errors[:, :n].max())) > trial.rounding.limit:
        text = f"the first cell, before any cut, differs from the uncut row by {size:.1e} already"
        causes = "the length of the row (later tokens, batch statistics, expert capacity)"
        found["carry"] = untestable("carry", f"{text}: results depend on {causes}")

    if trial.request.resets:
        at = trial.length // 3 + 1
        resets = torch.zeros(ROWS, trial.length, dtype=torch.bool)
        resets[:, at] = True
        own, other = (
            subject(torch.cat([first[:, :at], tokens[:, at:]], dim=1), start, resets).logits
            for first, start in ((tokens, state), (others, zeros))
        )
        text = f"the document before the reset at position {at} moves the logits {{}} positions after it"
        judge("resets", trial.errors(other, own)[:, at:], f"{text} by {{:.1e}}")
    return found


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
