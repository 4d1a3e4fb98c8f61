"""The interface: what `forward` takes and returns, which state the model has, and that nothing else decides the result."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.contracts.report import Verdict
from trainer.contracts.subject import CallFailed, NotTestable, Result, Subject, one_line, seed_generators
from trainer.contracts.trial import ROWS, Trial, relative
from trainer.errors import UserError
from trainer.import_path import format_error, shown_path

KNOWN_INPUTS = frozenset({"tokens", "state", "resets"})

RANDOM = (
    "in eval(), the same call gives another answer each time, by {:.1e} of the logits' spread: something random is active "
    "there, such as a dropout without training=self.training; pass that, or use nn.Dropout"
)


def find_state(model: nn.Module, seq_len: int) -> Verdict | None:
    """Give a model without `state_width` one, as the trainer does when it builds it; a verdict if that fails."""
    if getattr(model, "state_width", None) is not None:
        return None
    from trainer.model.state_layout import carry_flat  # of models that are written like this alone

    try:
        carry_flat(model, lengths=(seq_len,))
    except UserError as error:
        return Verdict("forward", "broken", f"{error.problem}{place_of_forward(model)}")
    except Exception as error:  # noqa: BLE001 - a user's model may raise anything
        text = format_error(error, otherwise=place_of_forward(model))
        return Verdict("forward", "broken", f"its forward fails with a row of {seq_len} tokens and no state: {text}")
    return None


def check_forward(subject: Subject, vocab_size: int, seq_len: int, takes_resets: bool) -> Verdict:
    """One row of the training length in `train()` and in `eval()`, and the shapes that come back."""
    width: int = subject.model.state_width  # type: ignore[assignment]
    tokens = (torch.arange(seq_len) % vocab_size)[None]
    resets = torch.zeros(1, seq_len, dtype=torch.bool) if takes_resets else None
    shape = "None" if not width else [1, width]
    for training in (True, False):
        where = "" if training else " in eval()"
        model = subject.fresh().train(training)
        try:
            given: dict[str, Any] = {"tokens": tokens.to(subject.device), "state": subject.zeros(1)}
            if resets is not None:
                given["resets"] = resets.to(subject.device)
            output = subject.forward(model, given, with_grad=False)
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            text = format_error(error, otherwise=place_of_forward(model))
            text = f"its forward fails{where} with tokens {list(tokens.shape)} and state {shape}: {text}"
            return Verdict("forward", "broken", text)
        problem = _mismatch(output, seq_len, vocab_size, width)
        if problem:
            return Verdict("forward", "broken", f"its forward returns{where} {problem}{place_of_forward(model)}")
    return Verdict("forward", "held", f"ran with tokens {list(tokens.shape)}")


def _mismatch(output: Any, length: int, vocab_size: int, width: int) -> str:
    """What is wrong with a forward's output for one row; empty if nothing is."""
    if not hasattr(output, "logits") or not hasattr(output, "state"):
        return f"a {type(output).__name__} without .logits and .state"
    logits, state = output.logits, output.state
    wanted = [1, length, vocab_size]
    shape = list(logits.shape) if isinstance(logits, Tensor) else None
    # More columns than ids do no harm: some pad the vocabulary.
    if shape is None or shape[:2] != wanted[:2] or len(shape) != len(wanted) or shape[2] < vocab_size:
        text = type(logits).__name__ if shape is None else shape
        return f"logits {text} for tokens [1, {length}], not {wanted}"
    found = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
    if width and found != [1, width]:
        return f"a state {found} for one row, not [1, {width}], its state_width"
    return ""


def why_no_state(subject: Subject, length: int) -> str:
    """What is wrong with a model that was found to have no state; empty if it has none on purpose.

    On purpose: it sets `state_width = 0` itself, or its forward has no parameter `state`.

    Raises:
        CallFailed: the model raised.
    """
    model = subject.model
    if not hasattr(model, "state_layout") or "state" not in inspect.signature(model.forward).parameters:
        return ""
    tokens = torch.zeros(1, length, dtype=torch.long, device=subject.device)
    try:  # its layout was looked for in eval()
        in_training = subject.forward(subject.fresh().train(), {"tokens": tokens, "state": None}, with_grad=False)
    except Exception as error:  # a user's model may raise anything
        raise CallFailed(f"forward fails with tokens {list(tokens.shape)}: {one_line(error)}") from error
    if in_training.state is not None:
        return "forward returns a state in train() and none in eval(): return it in both"
    return (
        "forward takes a state and returns none, so every cell starts from zero: return ModelOutput(..., state=...), or set "
        "state_width = 0 on a model without a state"
    )


def place_of_forward(model: nn.Module) -> str:
    """` (FILE:LINE)` of the model's `forward`; empty if it has none in Python."""
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    return "" if code is None else f" ({shown_path(code.co_filename)}:{code.co_firstlineno})"


def takes_resets(model: nn.Module) -> bool:
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


def check_purity(trial: Trial, live: Subject) -> tuple[Verdict, Trial]:
    """Judge purity, and find out in which modes the other checks have to run.

    Args:
        live: the model as it is, with its dropouts; the trial's has none.

    Returns:
        The verdict, and the trial for the checks that follow. If the verdict allows it, they run on one copy of the model
        instead of a fresh one per call.
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
    text, written = "", ""
    results: dict[bool, Result] = {}
    for training in (True, False):
        with trial.in_mode(training):
            model = subject.fresh()
            results[training], found = _with_writes(trial, tokens, state, model)
            written = written or found
            text, size = _again(trial, tokens, state, model, results[training])
        if text:
            break
    if not text:
        subject.is_pure = True
    if written:
        text = text or written
    is_random = trial.subject.training and _is_random(trial, tokens)
    modes, note = _modes(trial, results, is_random=is_random)
    trial = replace(trial, modes=modes, mode_note=note)
    if text:
        return Verdict("purity", "broken", text, size or None), trial
    if draws:
        text = "the model draws random numbers in eval(), which do not change its answer here"
        return Verdict("purity", "warning", text), trial
    difference = 0.0 if False not in modes or is_random else _difference(trial, results[True], results[False])
    if difference > max(64 * trial.noise, trial.noise**0.5):
        text = f"train() and eval() differ by {difference:.1e} of the logits' spread, though nothing is random: batch "
        text += "statistics, or a setting that only training has"
        return Verdict("purity", "warning", text, difference), trial
    return Verdict("purity", "held", f"the same call twice gives the same answer, in train() as in eval(){note}"), trial


def _repeat_live(trial: Trial, live: Subject, tokens: Tensor, state: Tensor | None) -> tuple[float, bool]:
    """How far two calls of the model as it is differ in eval(), 0.0 if by rounding alone, and whether it drew numbers.

    Each call is on a copy of its own, so that what a module keeps from call to call is no reason to differ; the generators
    are not reseeded between the two. Calls of one shape give the same bits; where nothing was drawn from torch's
    generators, a device may still add in another order.
    """
    live.training = False
    state = None if state is None else state.to(live.ledger_dtype)
    seed_generators()
    before = live.generator_state()
    first = live(tokens, state)
    second = live(tokens, state)
    draws = not torch.equal(before, live.generator_state())
    size = _difference(trial, second, first)
    limit = 0.0 if draws else torch.finfo(live.autocast or live.dtype).eps ** 0.5
    return (size if size > limit else 0.0), draws


def _again(trial: Trial, tokens: Tensor, state: Tensor | None, model: nn.Module, first: Result) -> tuple[str, float]:
    """Whether the same object gives the same answer to the same call, after another call in between."""
    trial.subject(trial.others(tokens), None if state is None else state.flip(0), on=model)
    size = _difference(trial, trial.subject(tokens, state, on=model), first)
    if size <= max(64 * trial.noise, 1e-12):
        return "", size
    mode = "train" if trial.subject.training else "eval"
    text = f"the same call gives another answer after another call in between, by {size:.1e}, in {mode}(): the module keeps "
    return f"{text}something of its own from call to call, which the ledger cannot see", size


def _with_writes(trial: Trial, tokens: Tensor, state: Tensor | None, model: nn.Module) -> tuple[Result, str]:
    """A call's result, and which of its arguments the forward writes into."""
    subject = trial.subject
    given_tokens, given = tokens.to(subject.device, copy=True), None if state is None else state.clone()
    result = subject(given_tokens, given, on=model, copies=False)
    if given is not None and state is not None and not torch.equal(given, state):
        return result, "forward writes into the incoming state, in place; compute a new tensor instead"
    if not torch.equal(given_tokens.cpu(), tokens):
        return result, "forward writes into tokens, in place; compute a new tensor instead"
    return result, ""


def _is_random(trial: Trial, tokens: Tensor) -> bool:
    with trial.in_mode(True):
        return trial.subject.draws_random_numbers(tokens)


def _modes(trial: Trial, results: dict[bool, Result], *, is_random: bool) -> tuple[tuple[bool, ...], str]:
    """The modes to judge: training alone if both give the same bits."""
    if is_random:
        return (False,), " (judged in eval(): in train() the model draws random numbers beside dropout)"
    if len(results) < 2:
        return (True,), ""
    same = torch.equal(results[True].logits, results[False].logits)
    return ((True,) if same else (True, False)), ""


def _difference(trial: Trial, found: Result, wanted: Result) -> float:
    size = float(trial.errors(found.logits, wanted.logits).max())
    if found.state is not None and wanted.state is not None:
        states = found.state.double(), wanted.state.double()
        unit = float(states[1].nan_to_num(0, 0, 0).square().mean().sqrt()) or 1.0
        size = max(size, float(relative(*states, unit).max()))
    return size
