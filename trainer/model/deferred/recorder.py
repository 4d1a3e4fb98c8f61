"""Notes what a constructor does to fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.model.deferred.steps import NotReplayable, Step, View, set_state

aten = torch.ops.aten
OVERWRITES = {
    *(aten.normal_, aten.uniform_, aten.random_, aten.bernoulli_, aten.exponential_, aten.log_normal_, aten.cauchy_),
    *(aten.zero_, aten.fill_, aten.copy_),
}
"""In-place operations that do not read what they overwrite."""


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode that stays the same one in copies of its tensors, so that `copy.deepcopy(module)` works."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Fakes:
        return self


class Generators:
    """Notices random generators that are seeded or restored between draws: a replay would go on from another state.

    A fake draw does not advance a generator; a real number is drawn instead, so that an earlier state differs.
    """

    def __init__(self) -> None:
        self._number = torch.empty(1, device="cpu")
        self._first: dict[torch.Generator, bytes] = {}
        self._last: dict[torch.Generator, bytes] = {}
        self._see(torch.default_generator)

    def draw(self, generator: torch.Generator) -> None:
        """Note a draw.

        Raises:
            NotReplayable: a generator is not where its last draw left it.
        """
        self._see(generator)
        self.check()
        with _disable_current_modes():
            self._number.uniform_(generator=generator)
        self._last[generator] = _state(generator)

    def check(self) -> None:
        """Raise if a generator is not where its last draw left it.

        Raises:
            NotReplayable: so it is.
        """
        if any(_state(generator) != last for generator, last in self._last.items()):
            raise NotReplayable("it seeds or restores a random generator that it also draws from")

    def restore(self) -> None:
        """Put all of them back to before the first draw."""
        for generator, state in self._first.items():
            set_state(generator, state)

    def own(self) -> dict[torch.Generator, bytes]:
        """The states before the first draw of all but torch's global generator."""
        return {generator: state for generator, state in self._first.items() if generator != torch.default_generator}

    def _see(self, generator: torch.Generator) -> None:
        if generator.device.type != "cpu":
            raise NotReplayable(f"it draws from a generator on {generator.device}")
        if generator not in self._first:
            self._first[generator] = self._last[generator] = _state(generator)


def _state(generator: torch.Generator) -> bytes:
    with _disable_current_modes():  # a fake state has no bytes
        return generator.get_state().numpy().tobytes()


class Recorder(TorchDispatchMode):
    """Notes operations; entered after `Fakes`, which runs them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.error: Exception | None = None
        """The first of an operation, even if the constructor caught it."""
        self.generators = Generators()
        self._constants: list[tuple[Tensor, Tensor]] = []
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # held: no address comes twice, and fake ones have no memory

    def number(self, tensor: Tensor) -> int:
        """The number of the tensor's storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
        return self._numbers[storage._cdata]

    def check(self) -> None:
        """Raise what the constructor caught, or what its end shows.

        Raises:
            Exception: an operation failed.
            NotReplayable: a generator was restored, or an array was written to after it had become a tensor.
        """
        if self.error is not None:
            raise self.error
        self.generators.check()
        if not all(data.numpy().tobytes() == copy.numpy().tobytes() for data, copy in self._constants):
            raise NotReplayable("it writes to an array after making a tensor of it")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors, and note it.

        Raises:
            NotReplayable: it cannot be replayed.
        """
        kwargs = kwargs or {}
        try:
            is_constant = func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor)
            step = self._constant(args[0]) if is_constant else self._operation(func, args, kwargs)
            returned = func(*args, **kwargs)
            self.note(step, returned)
        except Exception as error:
            self.error = self.error or error
            raise
        return returned

    def note(self, step: Step, returned: Any) -> None:
        """Keep a step that makes or changes content. A view does not, it is a part of a storage."""
        known = len(self._storages)
        for leaf in tree_leaves(returned):
            step.outputs.append(View.of(leaf, self.number(leaf)) if isinstance(leaf, Tensor) else None)
        step.creates = {view.storage for view in step.outputs if view is not None and view.storage >= known}
        if step.creates or step.writes:
            self.steps.append(step)

    def step(self, call: Any, args: Any, kwargs: Any, written: list[Tensor], *, overwrites: bool, draws: bool) -> Step:
        """An operation that is about to run, with the tensors as they are before it.

        Raises:
            NotReplayable: it writes to a real tensor, or draws from a generator that was restored.
        """
        if not all(isinstance(tensor, FakeTensor) for tensor in written):
            raise NotReplayable("it writes to a tensor that was made before or outside of torch")
        if draws:
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator))
            self.generators.draw(next(given, torch.default_generator))
        args, kwargs = tree_map_only(Tensor, lambda tensor: View.of(tensor, self.number(tensor)), (args, kwargs))
        whole = {self.number(tensor): tensor.untyped_storage().nbytes() for tensor in written if _is_whole(tensor)}
        writes = {self.number(tensor) for tensor in written}
        return Step(call, args, kwargs, draws, writes=writes, overwrites=whole if overwrites else {})

    def _operation(self, func: Any, args: Any, kwargs: Any) -> Step:
        # The schema of batch normalization does not say that it changes the running statistics.
        if func.overloadpacket is aten.set_ or (func.overloadpacket is aten.native_batch_norm and args[5]):
            raise NotReplayable(f"it uses {func}, whose effect on storages is not known")
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        named = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
        leaves = tree_leaves([given.get(name) for name in named])
        written = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Fused attention counts as random because of its dropout.
        draws = torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p") != 0.0
        return self.step(func, args, kwargs, written, overwrites=func.overloadpacket in OVERWRITES, draws=draws)

    def _constant(self, data: Tensor) -> Step:
        """The numbers of `torch.tensor([1.0])` or of an array: they are real, and are kept."""
        with _disable_current_modes():
            copy = data.detach().clone()
        self._constants.append((data, copy))
        return Step(copy.clone, constant_bytes=copy.nbytes)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


@contextmanager
def whole_trunc_normal(recorder: Recorder) -> Iterator[None]:
    """Note `nn.init.trunc_normal_` as one operation: it draws until it sees that all numbers are within the bounds."""
    original = nn.init._no_grad_trunc_normal_

    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        step = recorder.step(original, (tensor, *args), kwargs, [tensor], overwrites=True, draws=True)
        recorder.note(step, tensor)
        return tensor

    nn.init._no_grad_trunc_normal_ = note
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
