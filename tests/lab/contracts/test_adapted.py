"""Modules that know nothing of this trainer: the contract through the arguments that they have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer.lab.contracts import check_model
from trainer.lab.contracts.adapted import Adapted, adapt

VOCAB, DIM = 31, 12


class Tagger(nn.Module):
    """A GRU as torch's examples write it: a tuple, and a state with the rows second."""

    uses_hidden = True
    layers = 2

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.rnn = nn.GRU(DIM, DIM, self.layers, batch_first=True)

    def forward(self, x, hidden=None):
        y, end = self.rnn(self.embedding(x), hidden if self.uses_hidden else None)
        return self.head(y), end


class Forgetful(Tagger):
    uses_hidden = False


class Decayed(nn.Module):
    """A decaying sum of the embeddings, in the style of `transformers`: a cache object."""

    grows, counts = False, False

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, cache_params=None):
        x = self.embedding(input_ids)
        past = cache_params or SimpleNamespace(sum=torch.zeros_like(x[:, 0]), seen=0, layers=[])
        total, found = past.sum, []
        for at in range(x.shape[1]):
            total = 0.7 * total + x[:, at] * (1 + past.seen + at if self.counts else 1)
            found.append(total)
        y = torch.stack(found, 1)
        layers = [{"all": torch.cat([*(each["all"] for each in past.layers), x], 1)}] if self.grows else []
        after = SimpleNamespace(sum=total, seen=past.seen + x.shape[1], layers=layers)
        return SimpleNamespace(logits=self.head(y.tanh()), cache_params=after)


def variant(**settings: bool) -> nn.Module:
    torch.manual_seed(0)
    return type("Variant", (Decayed,), settings)()


def test_a_state_is_carried_through_the_argument_that_takes_it_wherever_its_rows_are():
    report = check_model(Tagger(), vocab_size=VOCAB)
    assert report.breaches == [], report
    assert report["carry"].status == report["gradient"].status == report["isolation"].status == "held", report
    assert check_model(Forgetful(), vocab_size=VOCAB)["carry"].status == "broken"


def test_the_tensors_of_a_cache_object_are_carried():
    report = check_model(variant(), vocab_size=VOCAB)
    assert report["carry"].status == "held", report


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"grows": True}, "grows with every token"), ({"counts": True}, "counts tokens for all rows together")],
)
def test_a_cache_that_is_no_state_is_named_and_not_called_a_breach(settings, why):
    model = variant(**settings)
    adapted = adapt(model)
    assert isinstance(adapted, Adapted)
    assert why in adapted.why_stateless
    report = check_model(model, vocab_size=VOCAB)
    assert report.breaches == [], report
    assert why in report["carry"].text
    assert (report["carry"] in report.unchecked) == ("grows" not in why)  # a context needs no state


def test_logits_of_another_shape_break_forward():
    class Pooled(Tagger):
        def forward(self, x, hidden=None):
            return super().forward(x, hidden)[0].mean(1)

    verdict = check_model(Pooled(), vocab_size=VOCAB)["forward"]
    assert verdict.status == "broken"
    assert "not logits [2, 8, 'V']" in verdict.text
