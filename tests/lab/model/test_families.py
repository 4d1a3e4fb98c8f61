"""Every family is built by its name, keeps the state contract, and refuses what it cannot be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.models import pretrained
from tests.support.runs import ROOT
from trainer.cli.parts import PARTS
from trainer.config.schema import ModelTable
from trainer.errors import UserError
from trainer.lab import gated_delta
from trainer.lab.contracts import check_model
from trainer.lab.gated_delta import CHUNK
from trainer.model.families import FAMILIES
from trainer.training.plan import build_model, family_of

VOCAB = 37
OF_TRANSFORMERS = [name for name, family in FAMILIES.items() if "model_type" in family.args]
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="extra hf")


def table(family: str | None, **settings: object) -> ModelTable:
    return ModelTable(family=family, **{"dim": 64, "num_layers": 2, **settings})


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [needs_transformers, pytest.mark.slow] if name in OF_TRANSFORMERS else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FAMILIES])
def test_a_family_keeps_the_contract(name, tmp_path):
    torch.manual_seed(0)
    args = {"from": pretrained(name, tmp_path, VOCAB)} if name in OF_TRANSFORMERS else {}
    report = check_model(build_model(table(name, args=args), VOCAB, parts=PARTS), vocab_size=VOCAB, seq_len=32)
    assert not report.breaches, report
    assert not report.warnings, report
    assert report["causality"].status == report["isolation"].status == "held"
    if name != "transformer":
        assert report["carry"].status == report["gradient"].status == "held", report
    if FAMILIES[name].is_own:
        assert report["resets"].status == "held", report


def test_the_weightless_model_has_the_parameters_and_the_state_of_the_real_one():
    with torch.device("meta"):
        model = build_model(table("gated_delta"), VOCAB, parts=PARTS)
    real = build_model(table("gated_delta"), VOCAB, parts=PARTS)
    assert [p.shape for p in model.parameters()] == [p.shape for p in real.parameters()]
    assert model.state_layout.to_json() == real.state_layout.to_json()


def test_flops_per_token_of_gated_delta_equal_torchs_count():
    torch.manual_seed(0)
    model = gated_delta.build(29, 2 * CHUNK, 2, heads=2)
    batch = torch.randint(0, 29, (2, 2 * CHUNK))
    state = model(batch).state  # in the middle of a document, where nothing is left out
    state = [{name: part.detach().requires_grad_() for name, part in layer.items()} for layer in state]
    with FlopCounterMode(display=False) as counter:
        output = model(batch, state)
        (output.logits.sum() + sum(layer["memory"].sum() for layer in output.state)).backward()
    assert model.flops_per_token(2 * CHUNK) == counter.get_total_flops() / batch.numel()


def test_a_model_is_a_family_or_a_target():
    assert family_of(table(None)) is FAMILIES["rglru"]
    with pytest.raises(UserError, match=r"model.family: there is no 'mamba'; choose one of rglru, .*mamba2"):
        build_model(table("mamba"), VOCAB, parts=PARTS)
    with pytest.raises(ValueError, match="are two models: remove one"):
        table("gated_delta", target="own:build")


def test_args_that_a_family_does_not_take_are_named():
    with pytest.raises(
        UserError, match=r"model.args: .*unexpected keyword argument 'head'; it takes .*heads, mlp_ratio"
    ):
        build_model(table("gated_delta", args={"head": 2}), VOCAB, parts=PARTS)


@needs_transformers
@pytest.mark.slow
def test_transformers_prints_nothing_while_a_model_of_its_own_is_found_to_keep_the_contract(tmp_path):
    """Not once per process: in a fresh one."""
    pretrained("mamba2", tmp_path, VOCAB)
    code = (
        "from trainer.config.schema import ModelTable\n"
        "from trainer.training.plan import build_model\n"
        "from trainer.lab.contracts import check_model\n"
        "from trainer.cli.parts import PARTS\n"
        f"table = ModelTable(family='mamba2', dim=64, num_layers=2, args={{'from': {str(tmp_path)!r}}})\n"
        f"report = check_model(build_model(table, {VOCAB}, parts=PARTS), vocab_size={VOCAB}, seq_len=32)\n"
        "assert not report.breaches + report.warnings, report\n"
        "assert all(report[each].status == 'held' for each in ('causality', 'isolation', 'carry', 'gradient')), report\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("", "")


@needs_transformers
@pytest.mark.parametrize(
    ("family", "args", "message"),
    [
        ("mamba2", {}, "model.args: mamba2 is read from a directory; set from, and no other args"),
        ("mamba2", {"from": "/nowhere", "num_heads": 3}, "model.args: mamba2 is read from a directory"),
        ("mamba2", {"from": "/nowhere"}, "model.args.from: /nowhere cannot be read: "),
        ("lfm2", {"from": ...}, " has a qwen3_next"),
        ("qwen3_next", {"from": ...}, "layer 1 is one of attention"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, family, args, message):
    if args.get("from") is ...:
        kinds = ["linear_attention", "full_attention"]
        args = {"from": pretrained("qwen3_next", tmp_path, VOCAB, layer_types=kinds)}
    with pytest.raises(UserError) as caught:
        build_model(table(family, args=args), VOCAB, parts=PARTS)
    assert message in caught.value.message


@needs_transformers
def test_a_directory_of_save_pretrained_is_read_and_grows_to_the_vocabulary(tmp_path):
    args = {"from": pretrained("mamba2", tmp_path / "one", VOCAB)}
    first = build_model(table("mamba2", args=args), VOCAB, parts=PARTS).eval()
    first.save_pretrained(tmp_path / "two")
    tokens = torch.arange(24).reshape(2, 12) % VOCAB
    again = build_model(table("mamba2", args={"from": str(tmp_path / "two")}), VOCAB + 3, parts=PARTS).eval()
    torch.testing.assert_close(again(tokens).logits[..., :VOCAB], first(tokens).logits)
    assert again(tokens).logits.shape[-1] == VOCAB + 3
