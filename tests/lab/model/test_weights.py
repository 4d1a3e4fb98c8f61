"""Weights to safetensors and back: the same bits, ties included, and nothing that does not fit."""

from __future__ import annotations

import pytest
import torch

from trainer.errors import UserError
from trainer.lab.weights import load_weights, read_weights
from trainer.model import build
from trainer.model.protocol import tied_names
from trainer.tools.saved_model import save_weights

safetensors_torch = pytest.importorskip("safetensors.torch")


def make(seed: int, *, vocab_size: int = 40, tie_embeddings: bool = False):
    torch.manual_seed(seed)
    return build(vocab_size, 16, 2, tie_embeddings=tie_embeddings)


@pytest.mark.parametrize("tied", [False, True])
def test_a_round_trip_keeps_every_bit(tied, tmp_path):
    model, other = make(0, tie_embeddings=tied), make(1, tie_embeddings=tied)
    save_weights(model.state_dict(), tied_names(model), tmp_path / "model.safetensors", {"step": "7"})
    assert read_weights(tmp_path)[1]["step"] == "7"
    load_weights(other, tmp_path, "bytes")
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_tied_weights_are_written_once_and_fit_an_untied_model(tmp_path):
    model, untied = make(0, tie_embeddings=True), make(1)
    path = tmp_path / "w.safetensors"
    save_weights(model.state_dict(), tied_names(model), path, {})
    assert len(safetensors_torch.load_file(path)) == len(model.state_dict()) - 1
    load_weights(untied, path, "bytes")
    assert torch.equal(untied.head.weight, model.embedding.weight)


def test_untied_weights_do_not_fit_a_tied_model(tmp_path):
    save_weights(make(0).state_dict(), {}, tmp_path / "w.safetensors", {})
    with pytest.raises(UserError, match=r"head\.weight differs from embedding\.weight, which the model ties to it"):
        load_weights(make(1, tie_embeddings=True), tmp_path / "w.safetensors", "bytes")


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path):
    path = tmp_path / "w.safetensors"
    state = dict(make(0, vocab_size=41).state_dict())
    state["extra"] = torch.zeros(2)
    del state["norm.weight"]
    save_weights(state, {}, path, {})
    model = make(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError) as refused:
        load_weights(model, path, "bytes")
    for text in (
        "norm.weight is not in it",
        "the model has no extra of its own",
        "embedding.weight has the shape (41, 16), the model's (40, 16) and 1 more",
    ):
        assert text in refused.value.message
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_damaged_and_absent_files_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(make(0).state_dict(), {}, path, {})
    path.write_bytes(path.read_bytes()[:-100])
    for each in (path, tmp_path / "nowhere", tmp_path / ("n" * 300)):
        with pytest.raises(UserError, match="is not a readable safetensors file"):
            read_weights(each)
