"""Adapts a causal model of any make to `forward(tokens, state)`.

Calls find out which argument carries the tokens and the state. It could go if every model were
written for `trainer.model.protocol`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.lab.contracts.subject import CallFailed, one_line, shape_of
from trainer.lab.contracts.trial import relative

TOKENS = ("tokens", "input_ids", "input", "inputs", "ids", "idx", "x")
CACHES = ("past_key_values", "cache_params")  # of transformers: such forwards take use_cache
STATES = ("state", "states", *CACHES, "hidden_state", "hidden", "hx", "h", "cache", "mems")
ROW, MORE = 8, 3  # tokens of the rows that are tried, and how many more show what grows
APART = 1e-5  # of the logits' spread: nothing but rounding, in any precision that is tried here


class Output(NamedTuple):
    """The output of an `Adapted`."""

    logits: Tensor  # [B, T, V]
    state: list[Tensor] | None


class Adapted(nn.Module):
    """A model behind `forward(tokens, state)`, whose state is a list of the tensors with rows that
    its own cache holds. Raises CallFailed: it takes no rows of token ids, or returns no logits.

    `why_stateless` is the reason where its cache cannot be such a state; `state_width` is then 0.
    The model returns logits [B, T, V] alone, in a tuple with the state, or as `.logits` of an
    object.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self.parameters_taken = {name: each.kind for name, each in parameters.items()}
        self.tokens_name = str(self._first(TOKENS))
        self.state_name = self._first(STATES)
        self.why_stateless = ""
        self._blank: Any = None
        self._dims: list[int | None] = []  # of rows, in each tensor of the cache
        was_training = model.training  # by hand: this package imports none of the trainer's models
        model.eval()  # a dropout would hide what is compared
        try:
            with torch.no_grad():
                self.why_stateless = self._find_state()
        finally:
            model.train(was_training)
        if self.why_stateless:
            self.state_width = 0  # otherwise `carry_flat` finds it

    def _first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self.parameters_taken), None)

    def forward(self, tokens: Tensor, state: list[Tensor] | None = None) -> Output:
        """Predict from tokens [B, T]; a state holds tensors [B, ...]."""
        cache = None
        if state is not None:
            cache = with_tensors(self._blank, self._placed(state))
        logits, cache = self.run(tokens, cache)
        if self.why_stateless:
            return Output(logits, None)
        return Output(logits, self._rows_first(tensors_of(cache)))

    def _rows_first(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors of a cache that have rows, as [B, ...]."""
        held = zip(tensors, self._dims, strict=True)
        return [each.movedim(dim, 0) for each, dim in held if dim is not None]

    def _placed(self, state: Iterable[Tensor]) -> list[Tensor | None]:
        """The tensors of the cache, from those `_rows_first`; None for the others."""
        rows, placed = iter(state), list[Tensor | None]()
        for dim in self._dims:
            if dim is None:
                placed.append(None)
            else:
                placed.append(next(rows).movedim(0, dim).clone())
        return placed

    def run(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Logits and the cache after the row, in the model's own form; `cache` is written to.
        Raises ValueError: no logits [B, T, V] were returned."""
        given: dict[str, Any] = {self.tokens_name: tokens}
        if self.state_name is not None and not self.why_stateless and cache is not None:
            given[self.state_name] = cache
        takes_any = inspect.Parameter.VAR_KEYWORD in self.parameters_taken.values()
        if "use_cache" in self.parameters_taken or (self.state_name in CACHES and takes_any):
            given["use_cache"] = not self.why_stateless
        logits, after = _parts(self.model(**given), self.state_name)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != tokens.shape:
            found, wanted = shape_of(logits), [*tokens.shape, "V"]
            raise ValueError(f"it returns {found} for tokens {list(tokens.shape)}, not logits {wanted}")
        if after is None:
            after = cache  # written to in place
        return logits, after

    def _find_state(self) -> str:
        """Learn the layout of the cache from rows of other shapes; why it is no state."""
        if self.state_name is None:
            self.why_stateless = "."  # `run` passes none
            self._try(2, ROW)
            return "forward takes no state"
        name = self.state_name
        try:
            shapes = ((2, ROW), (3, ROW), (2, ROW + MORE))
            cache, rows, longer = (self._try(*shape)[1] for shape in shapes)
        except CallFailed as error:
            self.why_stateless = "."
            self._try(2, ROW)
            return f"{name} cannot be used: {error}"
        held, of_rows, of_longer = (list(tensors_of(each)) for each in (cache, rows, longer))
        if not held:
            return f"{name} is returned without a tensor"
        if [each.shape for each in held] != [each.shape for each in of_longer]:
            return f"{name} grows with every token: a context, not a state of a fixed size"
        for one, other in zip(held, of_rows, strict=True):
            differing = (dim for dim in range(one.ndim) if one.shape[dim] != other.shape[dim])
            self._dims.append(next(differing, None))
        if all(dim is None for dim in self._dims):
            return f"{name} holds no tensor with one row for each row of tokens"
        # The tensors with rows must be all that it needs: in the cache of a longer row, continue from
        # them.
        self._blank = with_tensors(longer, [each.detach().clone() for each in of_longer])
        more, placed = self._tokens(2, MORE), self._placed(self._rows_first(held))
        found = self.run(more, with_tensors(self._blank, placed))[0]
        if distance(found, self.run(more, cache)[0]) > APART:
            return f"{name} counts tokens for all rows together, so that rows of different lengths cannot share it"
        return ""

    def _try(self, rows: int, length: int) -> tuple[Tensor, Any]:
        try:
            return self.run(self._tokens(rows, length))
        except Exception as error:  # what a user's model raises can be anything
            what = f"forward fails with {self.tokens_name} {[rows, length]}"
            raise CallFailed(f"{what}: {one_line(error)}") from error

    def _tokens(self, rows: int, length: int) -> Tensor:
        like = next(self.model.parameters(), torch.empty(0))
        return (torch.arange(rows * length, device=like.device) % 2).view(rows, length)


def adapt(model: nn.Module) -> nn.Module:
    """The model as it is, if its forward takes `tokens` by name or no token ids that are known;
    else behind an `Adapted`. Raises CallFailed: see there."""
    names = inspect.signature(model.forward).parameters
    if "tokens" in names or not set(TOKENS) & set(names):
        return model
    return Adapted(model)


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of logits [B, T, V] in units of their spread over positions."""
    flat = wanted.double().flatten(0, 1)
    spread = float((flat - flat.mean(0)).square().mean().sqrt())
    unit = spread or float(flat.square().mean().sqrt()) or 1.0
    return float(relative(found.double(), wanted.double(), unit).max())


def _parts(output: Any, state_name: str | None) -> tuple[Any, Any]:
    if hasattr(output, "logits"):
        states = (getattr(output, name, None) for name in (state_name, *STATES) if name)
        return output.logits, next((state for state in states if state is not None), None)
    if isinstance(output, tuple) and output:
        logits, state, *_ = *output, None
        return logits, state
    return output, None


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of tuples, lists, dicts and objects, in the order of `with_tensors`."""
    found: list[Tensor] = []
    _replaced(value, lambda each: found.append(each) or each, {})  # type: ignore[func-returns-value]
    return iter(found)


def with_tensors(value: Any, given: list[Tensor | None]) -> Any:
    """A copy of the nest with other tensors in it; None: a copy of the one that was there."""
    rest = iter(given)

    def change(each: Tensor) -> Tensor:
        new = next(rest)
        return each.clone() if new is None else new

    return _replaced(value, change, {})


def _replaced(value: Any, change: Callable[[Tensor], Tensor], seen: dict[int, Any]) -> Any:
    if id(value) in seen:  # a nest may hold one object twice, or itself
        return seen[id(value)]
    made: Any = value
    if isinstance(value, Tensor):
        made = change(value)
    elif isinstance(value, dict):
        made = seen[id(value)] = copy.copy(value)
        for key, each in value.items():
            made[key] = _replaced(each, change, seen)
    elif isinstance(value, (list, tuple)):
        parts = [_replaced(each, change, seen) for each in value]
        made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        made = seen[id(value)] = copy.copy(value)
        for key, each in vars(value).items():
            made.__dict__[key] = _replaced(each, change, seen)
    seen[id(value)] = made
    return made
