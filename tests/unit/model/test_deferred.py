"""Replayed weights are those of a plain construction bit for bit, one at a time, or the construction is refused."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from examples.own_parts import my_parts
from tests.support import models
from trainer.config.schema import ModelTable
from trainer.model.deferred import NotReplayable, record, replay
from trainer.model.families import FAMILIES
from trainer.tools.memory import LiveBytes, resident_bytes
from trainer.training.setup.plan import build_model

SEED, VOCAB = 5, 997
OUTSIDE = torch.ones(3)


class Own(nn.Module):
    """What `make` makes of it."""

    def __init__(self, make: Callable[[Own], object]) -> None:
        super().__init__()
        make(self)


def family(name: str, **settings: object) -> Callable[[], nn.Module]:
    table = ModelTable(family=name, **{"dim": 64, "num_layers": 2, **settings})
    return lambda: build_model(table, VOCAB)


def marks(name: str) -> list[pytest.MarkDecorator]:
    if "model_type" not in FAMILIES[name].args:
        return []
    missing = importlib.util.find_spec("transformers") is None
    return [pytest.mark.skipif(missing, reason="extra hf"), *[pytest.mark.slow] * (name != "mamba2")]


def named(model: nn.Module) -> dict[str, Tensor]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(tensors)


def assert_replayed(build: Callable[[], nn.Module]) -> None:
    """A record leaves the generator alone; both replays of it give what a plain construction gives."""
    torch.manual_seed(SEED)
    plain = build()
    state_after, expected = torch.get_rng_state(), named(plain)
    torch.manual_seed(SEED)
    state_before = torch.get_rng_state()
    model, recorded = record(build)
    assert torch.equal(torch.get_rng_state(), state_before)
    for _ in range(2):
        torch.manual_seed(SEED)
        replayed: list[tuple[str, Tensor]] = []
        replay(recorded, lambda name, tensor, to=replayed: to.append((name, tensor.clone())))
        assert torch.equal(torch.get_rng_state(), state_after)
        assert sorted(name for name, _ in replayed) == sorted(expected)  # each exactly once
        for name, tensor in replayed:
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name
    assert str(model) == str(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert len(list(model.parameters())) == len(list(plain.parameters()))  # ties
    for name, tensor in named(model).items():
        assert type(tensor) is type(expected[name]), name
        assert tensor.is_meta
        assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) == (
            expected[name].shape,
            expected[name].stride(),
            expected[name].dtype,
            expected[name].requires_grad,
        ), name


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FAMILIES])
def test_a_family_is_replayed(name):
    assert_replayed(family(name))


@pytest.mark.parametrize("name", ["rglru", "gated_delta", "lstm"])
def test_tied_weights_come_under_both_names(name):
    build = family(name, args={"tie_embeddings": True})
    assert_replayed(build)
    model, _ = record(build)
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize(
    "build",
    [
        lambda: my_parts.build_model(VOCAB, 16, 1),
        lambda: models.dropout(VOCAB, 16, 1),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),  # copies its layer
        lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.MultiheadAttention(8, 2), nn.PReLU()),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    ],
)
def test_a_model_of_the_users_own_is_replayed(build):
    assert_replayed(build)


def test_initializations_dtypes_and_buffers_are_replayed():
    def make(model: Own) -> None:
        init, linear = nn.init, nn.Linear(6, 4)
        model.weights = nn.ParameterList(nn.Parameter(torch.empty(6, 8)) for _ in range(7))
        init.trunc_normal_(model.weights[0])
        init.trunc_normal_(model.weights[1], std=0.02, a=-0.01, b=0.01)
        init.orthogonal_(model.weights[2])
        init.sparse_(model.weights[3], 0.3)
        init.eye_(model.weights[4])
        init.kaiming_normal_(model.weights[5])
        with torch.no_grad():
            model.weights[6].uniform_().sub_(0.5)
            model.weights[6][2:4].normal_()  # a part alone
        model.padded = nn.Embedding(5, 4, padding_idx=1)
        model.copied, model.linear = copy.deepcopy(linear), linear
        model.half = nn.Linear(4, 4, dtype=torch.bfloat16)
        model.replaced = nn.Linear(3, 3)
        model.replaced.weight.data = torch.zeros(3, 3)
        model.replaced.weight.data[0] = torch.randn(3)
        model.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril().view(1, 4, 4), persistent=False)
        model.register_buffer("literal", torch.tensor([1.0, 2.0]))
        model.register_buffer("array", torch.from_numpy(np.arange(4.0)))
        model.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))
        torch.set_default_dtype(torch.float64)
        try:
            model.double_width = nn.Linear(3, 3)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_replayed(lambda: Own(make))


def test_a_generator_of_the_models_own_is_replayed_from_its_first_state():
    def make(model: Own) -> None:
        generator = torch.Generator().manual_seed(7)
        model.a = nn.Parameter(torch.randn(4, generator=generator))
        model.b = nn.Parameter(torch.randn(4))
        model.c = nn.Parameter(torch.randn(4, generator=generator))

    assert_replayed(lambda: Own(make))


def test_the_model_on_meta_keeps_attributes_of_parameters_and_lists_of_them():
    def make(model: Own) -> None:
        model.rnn = nn.GRU(4, 4)
        model.rnn.weight_hh_l0.no_weight_decay = True

    model, _ = record(lambda: Own(make))
    assert model.rnn.weight_hh_l0.no_weight_decay
    assert [id(weight) for weight in model.rnn._flat_weights] == [id(weight) for weight in model.rnn.parameters()]


@pytest.mark.parametrize("name", ["rglru", "gated_delta", "transformer", pytest.param("mamba2", marks=marks("mamba2"))])
def test_one_parameter_exists_at_a_time(name):
    build = family(name, num_layers=12)
    model, recorded = record(build)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    with LiveBytes() as plain:
        held = build()
    assert plain.peak >= sum(sizes) == sum(parameter.nbytes for parameter in held.parameters())
    with LiveBytes() as live:
        replay(recorded, lambda _name, _tensor: None)
    assert max(sizes) <= live.peak < 1.25 * max(sizes)
    assert 6 * live.peak < sum(sizes)
    assert live.now == 0


def test_recording_makes_no_numbers():
    used = []

    def build() -> nn.Module:
        used.append(resident_bytes())
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])  # 128 MiB
        used.append(resident_bytes())
        return model

    record(build)
    assert used[1] - used[0] < 2**25


def item(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3) * torch.randn(()).item())


def caught_item(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3))
    try:
        model.scale = model.a.sum().item()
    except RuntimeError:
        model.scale = 0.0


def to_array(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3))
    model.array = model.a.detach().numpy()


def seeds(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3))
    torch.manual_seed(SEED)
    model.b = nn.Parameter(torch.randn(3))


def seeds_last(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3))
    torch.manual_seed(SEED)


def forks(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3))
    with torch.random.fork_rng(devices=[]):
        model.b = nn.Parameter(torch.randn(3))
    model.c = nn.Parameter(torch.randn(3))


def reseeds_its_own(model: Own) -> None:
    generator = torch.Generator()
    model.a = nn.Parameter(torch.randn(3, generator=generator.manual_seed(1)))
    model.b = nn.Parameter(torch.randn(3, generator=generator.manual_seed(1)))


def attribute(model: Own) -> None:
    model.layer = nn.Linear(3, 3)
    model.layer.tables = [torch.ones(3)]


def closure(model: Own) -> None:
    model.a, kept = nn.Parameter(torch.randn(3)), torch.ones(7)
    model.function = lambda: kept


def gradient(model: Own) -> None:
    model.layer = nn.Linear(5, 3)
    model.layer(torch.ones(1, 5)).sum().backward()


def reads_outside(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3) * OUTSIDE)


def keeps_outside(model: Own) -> None:
    model.a = nn.Parameter(OUTSIDE)


def writes_outside(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3))
    OUTSIDE.add_(1.0)


def writes_array(model: Own) -> None:
    array = np.zeros(3)
    model.register_buffer("a", torch.from_numpy(array))
    array[0] = 1.0


def large_array(model: Own) -> None:
    model.register_buffer("a", torch.from_numpy(np.zeros(2**22)))


def shares(model: Own) -> None:
    whole = torch.randn(6)
    model.a, model.b = nn.Parameter(whole[:3]), nn.Parameter(whole[3:])


def on_meta(model: Own) -> None:
    model.a = nn.Parameter(torch.empty(3, device="meta"))


def hook(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3))
    model.a.register_hook(lambda gradient: 0.0 * gradient)


def hidden_write(model: Own) -> None:
    model.norm = nn.BatchNorm1d(3)
    model.norm(torch.rand(4, 3))


def lazy(model: Own) -> None:
    model.a = nn.LazyLinear(3)


def conjugate(model: Own) -> None:
    model.a = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (item, "_local_scalar_dense"),
        (caught_item, "_local_scalar_dense"),
        (to_array, "numpy"),
        (seeds, "seeds or restores a random generator"),
        (seeds_last, "seeds or restores a random generator"),
        (forks, "seeds or restores a random generator"),
        (reseeds_its_own, "seeds or restores a random generator"),
        (attribute, "^layer.tables is kept, but is neither a parameter nor a buffer"),
        (closure, r"^a tensor \[7\] is kept"),
        (gradient, "is kept, but is neither a parameter nor a buffer"),
        (reads_outside, "made before or outside of torch"),
        (keeps_outside, "^a was read from a file, or made before"),
        (writes_outside, "writes to a tensor that was made before"),
        (writes_array, "writes to an array after making a tensor of it"),
        (large_array, "more than 16 MiB of its numbers"),
        (shares, "^b and a are different tensors in one storage"),
        (on_meta, "^a is made on meta, not on the CPU"),
        (hook, "^a has hooks"),
        (hidden_write, "native_batch_norm"),
        (lazy, "UninitializedParameter"),
        (conjugate, "views of conjugates"),
    ],
)
def test_what_cannot_be_replayed_is_refused(make, reason):
    torch.manual_seed(SEED)
    state = torch.get_rng_state()
    with pytest.raises(NotReplayable, match=reason) as caught:
        record(lambda: Own(make))
    assert caught.value.reason == str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(OUTSIDE, torch.ones(3))


def test_weights_of_a_file_are_refused(tmp_path: Path):
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(NotReplayable, match="set_"):
        record(lambda: Own(lambda model: setattr(model, "a", nn.Parameter(torch.load(tmp_path / "a.pt")["a"]))))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="extra hf")
def test_a_model_that_is_read_from_a_directory_is_refused(tmp_path: Path):
    family("mamba2")().save_pretrained(tmp_path)
    with pytest.raises(NotReplayable, match="was read from a file"):
        record(family("mamba2", args={"from": str(tmp_path)}))


def test_a_constructor_that_fails_is_refused_with_what_it_says():
    with pytest.raises(NotReplayable, match="this model has one layer"):
        record(lambda: my_parts.build_model(VOCAB, 16, 2))
