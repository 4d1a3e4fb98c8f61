"""Purity: a forward's result depends on its arguments and on the weights alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.contracts.report import Verdict
from trainer.contracts.subject import Result
from trainer.contracts.trial import ROWS, Trial, relative


def check_purity(trial: Trial) -> tuple[Verdict, Trial]:
    """Judge purity, and find out in which modes the other checks have to run.

    Returns:
        The verdict, and the trial for the checks that follow. If the verdict allows it, they run on one copy of the model
        instead of a fresh one per call.
    """
    subject = trial.subject
    tokens, state = trial.tokens(), trial.start_state(ROWS)
    text, written, size = "", "", 0.0
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
    with trial.in_mode(False):
        if subject.draws_random_numbers(tokens):
            text = "the model draws random numbers in eval(), so an evaluation does not repeat itself"
            return Verdict("purity", "warning", text), trial
    difference = 0.0 if False not in modes or is_random else _difference(trial, results[True], results[False])
    if difference > max(64 * trial.noise, trial.noise**0.5):
        text = f"train() and eval() differ by {difference:.1e} of the logits' spread, though nothing is random: batch "
        text += "statistics, or a setting that only training has"
        return Verdict("purity", "warning", text, difference), trial
    return Verdict("purity", "held", f"the same call twice gives the same answer, in train() as in eval(){note}"), trial


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
        unit = float(states[1].square().mean().sqrt()) or 1.0
        size = max(size, float(relative(*states, unit).max()))
    return size
