"""The interface: what `forward` takes and what it returns, and which state the model has."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from trainer.contracts.report import Verdict
from trainer.contracts.subject import CallFailed, NotTestable, Subject, one_line
from trainer.errors import UserError
from trainer.import_path import format_error, shown_path

KNOWN_INPUTS = frozenset({"tokens", "state", "resets"})


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
