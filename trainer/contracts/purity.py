"""Purity: a forward's result depends on its arguments and on the weights alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.contracts.report import Verdict
from trainer.contracts.subject import Result, Subject, seed_generators
from trainer.contracts.trial import ROWS, Trial, relative

RANDOM = (
    "in eval(), the same call gives another answer each time, by {:.1e} of the logits' spread: something random is active "
    "there, such as a dropout without training=self.training; pass that, or use nn.Dropout"
)


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
