"""The loss in chunks: the numbers of the plain loss, with logits of few tokens at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import UserError
from trainer.lab import gated_delta, transformer
from trainer.lab.models import ChunkedObjective, Headless, refuse_more_than_a_head
from trainer.lab.sharding import output_layer
from trainer.model.protocol import ModelOutput
from trainer.objective import Objective
from trainer.options import CoordOptions, ObjectiveOptions

VOCAB = 61
CPU = torch.device("cpu")
PLAIN = Objective(ObjectiveOptions(z_loss=1e-3, coord=CoordOptions(first_token=40, num_bins=15, sigma=2.0)))


def of_rows(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none", label_smoothing=0.1)


def batch(rows: int = 3, length: int = 37) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which the first row's are mostly masked."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(VOCAB, (2, rows, length), generator=generator)
    targets[0, :-1] = -100
    return tokens, targets


class TwoBiases(nn.Linear):
    """Of parameters that enter as a sum, autograd gives one tensor as the gradient of each."""

    def __init__(self) -> None:
        super().__init__(32, VOCAB)
        self.more = nn.Parameter(torch.randn(VOCAB))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias + self.more)


@pytest.mark.parametrize("head", ["own", "tied", "sum"])
@pytest.mark.parametrize("chunk", [1, 7, 37, 111, 1000])
@pytest.mark.parametrize("loss", [PLAIN, Objective(own=of_rows, vocab_size=VOCAB)], ids=["built-in", "own"])
def test_losses_parts_and_gradients_are_those_of_the_plain_loss(chunk, head, loss):
    torch.manual_seed(0)
    model = transformer.build(VOCAB, 32, 2, heads=2, tie_embeddings=head == "tied").double()
    if head == "sum":
        model.head = TwoBiases().double()
    tokens, targets = batch()
    found = []
    for run, each in (
        (model, loss),
        (Headless(model, model.head), ChunkedObjective(loss, model.head, chunk_tokens=chunk)),
    ):
        model.zero_grad()
        result = each(run(tokens=tokens, state=None).logits, targets)
        result.loss_sum.backward()
        found.append((result, [parameter.grad.clone() for parameter in model.parameters()]))
    (plain, expected), (chunked, gradients) = found
    torch.testing.assert_close(chunked.loss_sum, plain.loss_sum, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
    assert chunked.num_tokens == plain.num_tokens
    assert chunked.parts.keys() == plain.parts.keys()
    for name, term in plain.parts.items():
        torch.testing.assert_close(chunked.parts[name].sum, term.sum, rtol=1e-12, atol=0)
        assert chunked.parts[name].num_tokens == term.num_tokens
        assert not chunked.parts[name].sum.requires_grad
    torch.testing.assert_close(chunked.token_loss, plain.token_loss, rtol=1e-12, atol=1e-14)
    assert torch.equal(chunked.is_correct, plain.is_correct)


@pytest.mark.cuda
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["autocast", "weights as FSDP2 gathers them"])
@pytest.mark.parametrize("tie", [False, True])
def test_under_bf16_gradients_are_as_exact_as_the_plain_ones_for_any_number_of_chunks(device, tie, weights):
    """Against float64 with the same weights. Targets follow Zipf's law; rows of rare ones have an error of their own."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
    if tie:
        embedding.weight = head.weight
    model = nn.ModuleList([embedding, head]).to(device, torch.bfloat16)
    drawn = torch.multinomial(torch.arange(1.0, VOCAB + 1.0) ** -1.5, 1024, replacement=True)
    tokens, targets = drawn.view(2, 1, 512).to(device)
    rare = targets.flatten().bincount(minlength=VOCAB).argsort()[:20]

    def gradients(chunk: int | None, dtype: torch.dtype) -> list[Tensor]:
        model.zero_grad()
        model.to(dtype)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype != torch.float64):
            hidden = torch.tanh(embedding(tokens))
            if chunk is None:
                PLAIN(head(hidden), targets).loss_sum.backward()
            else:
                ChunkedObjective(PLAIN, head, chunk_tokens=chunk)(hidden, targets).loss_sum.backward()
        return [parameter.grad.double() for parameter in model.parameters()]

    exact, plain = gradients(None, torch.float64), gradients(None, weights)
    for chunk in (512, 64, 8, 2):
        for true, reference, found in zip(exact, plain, gradients(chunk, weights), strict=True):
            for rows in (slice(None), rare):
                error, allowed = ((each - true)[rows].norm() for each in (found, reference))
                assert error < 1.5 * max(allowed, 2**-9 * true[rows].norm()), chunk


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
    chunked = ChunkedObjective(Objective(ObjectiveOptions(z_loss=1e-3)), model.head, chunk_tokens=16)
    for run, loss, most in ((model, PLAIN, tokens.numel()), (Headless(model, model.head), chunked, 16)):
        with Largest() as largest:
            loss(run(tokens=tokens, state=None).logits, tokens).loss_sum.backward()
        assert largest.numel == most * vocab_size


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
    masked = lambda x: torch.cat([x[..., :8], x[..., 8:] - torch.inf], dim=-1)  # noqa: E731 - as the others
    for after in (lambda x: 3.0 * torch.tanh(x / 3.0), lambda x: x[..., :-1], lambda x: x + 1.0, masked):
        model = Capped(after)
        with pytest.raises(UserError, match=r"objective.chunk_tokens: the model's logits are not those"):
            refuse_more_than_a_head(model, output_layer(model), CPU, seq_len=12)
    for after in (lambda x: x, lambda x: x.float()):
        model = Capped(after)
        refuse_more_than_a_head(model, output_layer(model), CPU, seq_len=12)


def test_a_model_whose_output_layer_has_another_name_is_refused():
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    with pytest.raises(UserError, match=r"head is a NoneType, no nn.Linear.*get_output_embeddings"):
        output_layer(model)
