"""What is written for `from_pretrained` computes and generates the same, and experts' losses are weighed."""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import pretrained
from trainer.arrays import IGNORED
from trainer.cli.parts import PARTS
from trainer.config.schema import ModelTable, ObjectiveTable
from trainer.lab.hugging_face import references_on_cpu, writer_of
from trainer.lab.samples import Draw, generate
from trainer.model.families import FAMILIES
from trainer.model.protocol import ModelOutput
from trainer.objective import Objective
from trainer.training.plan import build_model, make_auxiliary

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="extra hf")

VOCAB = 97
ADAPTED = [name for name, family in FAMILIES.items() if "model_type" in family.args]


def noisy(family: str, **args: object) -> nn.Module:
    """A model whose every parameter counts: norms and biases start at 1 and 0, which would hide one that is left out."""
    torch.manual_seed(0)
    if family in ADAPTED:
        with tempfile.TemporaryDirectory() as directory:
            return _noisy(family, {"from": pretrained(family, Path(directory), VOCAB, **args)})
    return _noisy(family, args)


def _noisy(family: str, args: dict[str, object]) -> nn.Module:
    model = build_model(ModelTable(family=family, dim=64, num_layers=2, args=args), VOCAB, parts=PARTS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def logits_of(model: nn.Module, **tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**tokens).logits


@pytest.mark.parametrize(
    ("family", "args", "architecture"),
    [
        ("transformer", {"heads": 4, "kv_heads": 2}, "LlamaForCausalLM"),
        ("transformer", {"tie_embeddings": True}, "LlamaForCausalLM"),
        ("gated_delta", {"heads": 2}, "Qwen3NextForCausalLM"),
        ("gated_delta", {"heads": 4, "mlp_ratio": 1.5, "tie_embeddings": True}, "Qwen3NextForCausalLM"),
        *[(name, {}, None) for name in ADAPTED],
    ],
)
def test_the_reopened_model_computes_and_generates_the_same(tmp_path, family, args, architecture):
    model = noisy(family, **args)
    writer_of(model)(tmp_path)
    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    references_on_cpu(opened)
    assert architecture in (None, type(opened).__name__)
    assert sum(p.numel() for p in opened.parameters()) == sum(p.numel() for p in model.parameters())
    tokens = torch.randint(VOCAB, (2, 150))  # more than two chunks
    torch.testing.assert_close(
        logits_of(opened, input_ids=tokens), logits_of(model, tokens=tokens), rtol=1e-4, atol=2e-4
    )
    prompt = [0, 5, 0, 7]  # id 0 is a token like any other
    expected = list(itertools.islice(generate(model, prompt, draw=Draw(temperature=0), cell=64), 12))
    new = opened.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    end = VOCAB - 1
    assert new.tolist() == (expected[: expected.index(end) + 1] if end in expected else expected)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []}


def test_the_loss_of_a_mixture_of_experts_is_weighed_as_transformers_does():
    experts = {**EXPERTS, "shared_expert_intermediate_size": 16, "router_aux_loss_coef": 0.3}
    assert noisy("qwen3_next", **experts).loss_keys == {}
    model = noisy("qwen3_next", **experts, output_router_logits=True).train()
    tokens = torch.randint(VOCAB, (3, 20))
    micro = SimpleNamespace(targets=nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED), meta=None)
    auxiliary = make_auxiliary(ObjectiveTable(losses={"aux_loss": 0.3}), model, PARTS)

    def total(output: ModelOutput) -> Tensor:
        result = auxiliary(Objective()(output.logits, micro.targets), output, micro)
        return result.loss_sum / result.num_tokens

    parameters = list(model.parameters())
    theirs = model.model(input_ids=tokens, labels=tokens, use_cache=False)
    ours = total(model(tokens=tokens))
    assert ours.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    gradients = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (ours, theirs.loss))
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-6)
