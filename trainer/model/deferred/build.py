"""Builds a model without its numbers, and records how they are made."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from trainer.import_path import format_error
from trainer.model.deferred.recorder import Fakes, Recorder, whole_trunc_normal
from trainer.model.deferred.steps import NotReplayable, Record, View, needed

MOST_CONSTANT_BYTES = 2**24
"""Of literals and arrays that become parameters or buffers: a record holds them, and a model is not to exist whole."""

Registered = dict[int, tuple[list[str], Tensor]]
"""Each parameter and buffer with all its names, by the tensor's id."""


def record(build: Callable[[], nn.Module]) -> tuple[nn.Module, Record]:
    """Call `build` without making numbers; the parameters and buffers of the model are then on the meta device.

    The states of random generators stay what they were.

    Raises:
        NotReplayable: `build` fails, looks at numbers, reads weights from a file, restores a generator that it draws from, or
            keeps tensors that are neither parameters nor buffers.
    """
    recorder, fakes = Recorder(), Fakes(allow_non_fake_inputs=True)
    try:
        with warnings.catch_warnings(), fakes, recorder, whole_trunc_normal(recorder):
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # by copy.deepcopy
            model = build()
            ordinary = vars(torch.empty(0, device="cpu")).keys()
        recorder.check()
    except Exception as error:
        first = recorder.error or error  # whatever the user's code made of it
        raise first if isinstance(first, NotReplayable) else NotReplayable(format_error(first)) from error
    finally:
        recorder.generators.restore()
    tensors = _registered(model)
    _refuse_unregistered(model, fakes, tensors)
    kept: dict[int, list[tuple[str, View]]] = {}
    for names, tensor in tensors.values():
        storage = recorder.number(tensor)
        if storage in kept:
            raise NotReplayable(f"{names[0]} and {kept[storage][0][0]} are different tensors in one storage")
        kept[storage] = [(name, View.of(tensor, storage)) for name in names]
    steps = needed(recorder.steps, kept)
    if sum(step.constant_bytes for step in steps) > MOST_CONSTANT_BYTES:
        raise NotReplayable(f"more than {MOST_CONSTANT_BYTES >> 20} MiB of its numbers come from arrays or literals")
    _move_to_meta(model, tensors, ordinary)
    return model, Record(steps, kept, recorder.generators.own())


def _registered(model: nn.Module) -> Registered:
    found: Registered = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found.setdefault(id(tensor), ([], tensor))[0].append(f"{prefix}.{name}".removeprefix("."))
    for names, tensor in found.values():
        if not isinstance(tensor, FakeTensor):
            raise NotReplayable(f"{names[0]} was read from a file, or made before or outside of torch")
        if tensor.device.type != "cpu":
            raise NotReplayable(f"{names[0]} is made on {tensor.device}, not on the CPU")
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks or not tensor.is_leaf:
            raise NotReplayable(f"{names[0]} has hooks or a gradient's history")
    return found


def _refuse_unregistered(model: nn.Module, fakes: Fakes, tensors: Registered) -> None:
    """Refuse tensors that would stay fake, wherever they are: attributes, closures, caches of a module."""

    def others() -> list[FakeTensor]:
        registered = {id(tensor) for _, tensor in tensors.values()}
        registered |= {id(tensor._base) for _, tensor in tensors.values()}  # of a buffer that is a view
        found = (thing for thing in gc.get_objects() if type(thing) is FakeTensor)
        return [tensor for tensor in found if tensor.fake_mode is fakes and id(tensor) not in registered]

    if others():
        gc.collect()
    for tensor in others():
        names = [
            f"{prefix}.{name}".removeprefix(".")
            for prefix, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers") and any(leaf is tensor for leaf in tree_leaves(value))
        ]
        where = names[0] if names else f"a tensor {list(tensor.shape)}"
        raise NotReplayable(f"{where} is kept, but is neither a parameter nor a buffer")


def _move_to_meta(model: nn.Module, tensors: Registered, ordinary: Iterable[str]) -> None:
    """Put meta tensors in place of fake ones, with the attributes that the constructor gave them."""
    moved: dict[int, Tensor] = {}
    for key, (_, fake) in tensors.items():
        new = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")
        new = nn.Parameter(new, fake.requires_grad) if isinstance(fake, nn.Parameter) else new
        new.requires_grad_(fake.requires_grad)
        vars(new).update({name: value for name, value in vars(fake).items() if name not in {*ordinary, "_is_param"}})
        moved[key] = new
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                setattr(module, name, moved[id(tensor)])  # not into the dict: an nn.GRU has a list of its parameters
