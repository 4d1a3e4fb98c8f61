"""One small forward pass of the model before anything is trained: does it keep what `SequenceModel` asks for?"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.import_path import format_error, shown_path
from trainer.metrics.batch_extras import check_inputs
from trainer.training.setup.parts import autocast_context, state_width
from trainer.training.setup.plan import Plan, build_model
from trainer.training.step.microbatch import accepted_inputs

MAX_PARAMETERS = 50_000_000
# Parameters times tokens: under a second of one core. The row is as long as in training, since a model may need that length.
MAX_WORK = 20_000_000_000
MAX_LOGITS = 100_000_000

_KNOWN_INPUTS = frozenset({"tokens", "state", "resets"})
_CONTRACT = (
    "make it forward(tokens [B, T], state [B, state_width]) -> ModelOutput(logits [B, T, V], state [B, state_width]), "
    "as trainer.model.protocol.SequenceModel describes it"
)


def try_forward(plan: Plan) -> str:
    """Run one row through a model of this config, on the CPU and in evaluation mode, and look at what comes back.

    The generators are left as they were.

    Returns:
        `ran`, or why it was not tried.

    Raises:
        UserError: the model fails, or does not take or return what the training step relies on.
    """
    not_tried = _why_not(plan)
    if not_tried:
        return f"not tried: {not_tried}"
    with torch.random.fork_rng(devices=[]):
        model = build_model(plan.config.model, plan.vocab_size).eval()
        cell, burn_in = plan.config.data.seq_len, plan.config.ledger.burn_in
        inputs = _inputs(plan, cell)
        accepted = accepted_inputs(model)
        if _has_own_data(plan) and not _required(model) <= _KNOWN_INPUTS:
            return "not tried: the model takes inputs that only the data of your own have"
        if accepted is not None:
            check_inputs(inputs, accepted)
        width = state_width(model)
        state = torch.zeros(1, width) if width else None
        # Burn-in runs a cell in two pieces.
        for length in sorted({cell, cell - burn_in, burn_in or cell}, reverse=True):
            with torch.no_grad(), autocast_context(plan.config, torch.device("cpu"))():
                output = _call(plan, model, _inputs(plan, length), state)
            problem = _mismatch(output, length, plan.vocab_size, width)
            if problem:
                raise _refusal(plan, f"{problem}{_place_of_forward(model)}")
    return "ran"


def what_breaks_it(plan: Plan) -> str:
    """Why the model can train nowhere, for a run that failed in its first step; empty if it is not the model alone."""
    try:
        try_forward(plan)
    except UserError as error:
        return error.message
    return ""


def _why_not(plan: Plan) -> str:
    wanted = plan.config.train.device
    # A model for CUDA may use kernels that the CPU does not have; a check must not occupy a device.
    is_for_cuda = wanted == "cuda" or plan.config.train.precision == "fp16"
    if is_for_cuda or (wanted == "auto" and torch.cuda.is_available()):
        return "the run is for CUDA"
    count, tokens = plan.num_parameters(), plan.config.data.seq_len
    if count > MAX_PARAMETERS or count * tokens > MAX_WORK or tokens * plan.vocab_size > MAX_LOGITS:
        return f"{count:,} parameters and rows of {tokens:,} tokens would take long"
    return ""


def _inputs(plan: Plan, length: int) -> dict[str, Any]:
    """What the training step passes beside the state: see `trainer.data.mixing.collate`."""
    inputs = {"tokens": (torch.arange(length) % plan.vocab_size)[None]}  # [1, T]
    if plan.config.data.pack and not _has_own_data(plan):
        inputs["resets"] = torch.zeros(1, length, dtype=torch.bool)
    return inputs


def _has_own_data(plan: Plan) -> bool:
    return any(source.table.target is not None for source in plan.sources)


def _required(model: nn.Module) -> set[str]:
    """Names that `forward` cannot be called without."""
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in skipped}


def _call(plan: Plan, model: nn.Module, inputs: dict[str, Any], state: Tensor | None) -> Any:
    try:
        return model(**inputs, state=state)
    except UserError:
        raise
    except Exception as error:  # what the user's own function does may raise anything
        text = format_error(error, otherwise=_place_of_forward(model))
        shape = "None" if state is None else list(state.shape)
        given = f"tokens {list(inputs['tokens'].shape)} and state {shape}"
        raise _refusal(plan, f"its forward fails with {given}: {text}") from error


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


def _place_of_forward(model: nn.Module) -> str:
    """` (FILE:LINE)` of the model's `forward`; empty if it has none in Python."""
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    return "" if code is None else f" ({shown_path(code.co_filename)}:{code.co_firstlineno})"


def _refusal(plan: Plan, problem: str) -> UserError:
    return UserError("model.target", f"{plan.config.model.target}: {problem}", _CONTRACT)
