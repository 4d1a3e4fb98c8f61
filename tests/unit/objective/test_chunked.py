"""The loss in chunks: the numbers of the plain loss, with logits of few tokens at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import UserError
from trainer.model import gated_delta, transformer
from trainer.model.protocol import ModelOutput
from trainer.model.wrappers import Headless, output_layer, refuse_more_than_a_head
from trainer.objective import CoordSettings, Objective
from trainer.objective.chunked import ChunkedObjective

VOCAB = 61
CPU = torch.device("cpu")
PLAIN = Objective(z_loss=1e-3, coord=CoordSettings(first_token=40, num_bins=15, sigma=2.0))


def batch(rows: int = 3, length: int = 37) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which the first row's are mostly masked."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(VOCAB, (2, rows, length), generator=generator)
    targets[0, :-1] = -100
    return tokens, targets


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 37, 111, 1000])
def test_losses_parts_and_gradients_are_those_of_the_plain_loss(chunk, tie):
    torch.manual_seed(0)
    model = transformer.build(VOCAB, 32, 2, heads=2, tie_embeddings=tie).double()
    tokens, targets = batch()
    found = []
    for run, loss in (
        (model, PLAIN),
        (Headless(model, model.head), ChunkedObjective(PLAIN, model.head, chunk_tokens=chunk)),
    ):
        model.zero_grad()
        result = loss(run(tokens=tokens, state=None).logits, targets)
        result.loss_sum.backward()
        found.append((result, [parameter.grad.clone() for parameter in model.parameters()]))
    (plain, expected), (chunked, gradients) = found
    torch.testing.assert_close(chunked.loss_sum, plain.loss_sum, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
    assert chunked.num_tokens == plain.num_tokens
    assert chunked.parts.keys() == plain.parts.keys() == {"token_ce", "z_loss", "coord"}
    for name, term in plain.parts.items():
        torch.testing.assert_close(chunked.parts[name].sum, term.sum, rtol=1e-12, atol=0)
        assert chunked.parts[name].num_tokens == term.num_tokens
        assert not chunked.parts[name].sum.requires_grad
    torch.testing.assert_close(chunked.token_loss, plain.token_loss, rtol=1e-12, atol=1e-14)
    assert torch.equal(chunked.is_correct, plain.is_correct)


def test_under_bf16_the_difference_is_its_rounding():
    torch.manual_seed(0)
    model = transformer.build(VOCAB, 32, 2, heads=2)
    tokens, targets = batch()

    def gradients(run: nn.Module, loss: object, dtype: torch.dtype) -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss(run(tokens=tokens, state=None).logits, targets).loss_sum.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    exact = gradients(model, PLAIN, torch.float32)
    plain = (gradients(model, PLAIN, torch.bfloat16) - exact).norm()
    chunked = ChunkedObjective(PLAIN, model.head, chunk_tokens=16)
    found = (gradients(Headless(model, model.head), chunked, torch.bfloat16) - exact).norm()
    assert 0 < found < 1.5 * plain


class Largest(TorchDispatchMode):
    """The most numbers of any tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_tensor_is_as_large_as_all_logits():
    vocab_size = 5000
    model = transformer.build(vocab_size, 8, 1, heads=1)
    tokens = torch.randint(vocab_size, (4, 64))
    chunked = ChunkedObjective(Objective(z_loss=1e-3), model.head, chunk_tokens=16)
    for run, loss, most in ((model, PLAIN, tokens.numel()), (Headless(model, model.head), chunked, 16)):
        with Largest() as largest:
            loss(run(tokens=tokens, state=None).logits, tokens).loss_sum.backward()
        assert largest.numel == most * vocab_size


def test_logits_are_held_for_a_chunk_alone():
    """What the backward keeps of the loss is of the hidden states' size: no chunk's logits live on to the backward."""
    vocab_size = 5000
    model = transformer.build(vocab_size, 8, 1, heads=1)
    tokens = torch.randint(vocab_size, (4, 64))
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() if tensor is not model.head.weight else 0)
        return tensor

    hidden = Headless(model, model.head)(tokens=tokens, state=None).logits
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ChunkedObjective(PLAIN, model.head, chunk_tokens=16)(hidden, tokens)
    assert max(kept) <= hidden.numel()


def test_the_model_itself_still_gives_logits():
    model = gated_delta.build(VOCAB, 32, 1, heads=2)
    tokens, _ = batch()
    before = model(tokens=tokens).logits
    assert Headless(model, model.head)(tokens=tokens, state=None).logits.shape == (3, 37, 32)
    assert torch.equal(model(tokens=tokens).logits, before)
    with pytest.raises(TypeError):
        Headless(model, model.head)(words=tokens)
    assert torch.equal(model(tokens=tokens).logits, before)


class Capped(nn.Module):
    """A model whose logits are changed after its output layer, by what it is given."""

    state_width = 0

    def __init__(self, after: object, lengths: tuple[int, ...] = (8, 12)) -> None:
        super().__init__()
        self.lengths = lengths
        self.embedding, self.head, self.after = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB), after

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        assert tokens.shape[1] in self.lengths
        return ModelOutput(self.after(self.head(self.embedding(tokens))), None)


def test_a_model_that_changes_its_logits_is_refused_and_another_is_not():
    for after in (lambda x: 3.0 * torch.tanh(x / 3.0), lambda x: x[..., :-1], lambda x: x + 1.0):
        model = Capped(after)
        with pytest.raises(UserError, match=r"objective.chunk_tokens: the model's logits are not those"):
            refuse_more_than_a_head(model, output_layer(model), CPU, seq_len=12)
    for after in (lambda x: x, lambda x: x.float()):
        model = Capped(after)
        refuse_more_than_a_head(model, output_layer(model), CPU, seq_len=12)


def test_a_model_whose_output_layer_has_another_name_is_refused():
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    with pytest.raises(UserError, match=r"Sequential has no nn.Linear named head.*get_output_embeddings"):
        output_layer(model)
