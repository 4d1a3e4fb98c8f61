"""Real runs of two ranks in which a diagnostic or a component of the loss fails on one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import read_rows, train, write_tiny_config
from trainer.data.tokenizer import BytesTokenizer

pytestmark = pytest.mark.distributed

# Imported by the program as the model's target; it looks in on what every rank does, and spoils what it is asked to.
MODULE = """
import json, os
import torch
from pathlib import Path
from trainer.model import build as build_ours
from trainer.model.protocol import ModelOutput
import trainer.training.core_extensions as step_details

RANK = os.environ.get("RANK", "0")
FOLDER = Path(__file__).parent

def note(name, value):
    with open(FOLDER / f"{name}.{RANK}", "a") as file:
        file.write(json.dumps(value) + "\\n")

class Spoiled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.state_width, self.calls = inner, inner.state_width, 0
    def forward(self, tokens, state=None):
        output, self.calls = self.inner(tokens, state=state), self.calls + 1
        if self.calls == int(os.environ.get("SPOIL_LOGITS_AT", 0)) and RANK == "1":
            return ModelOutput(output.logits[:, 1:], output.state)
        return output

def build(vocab_size, dim, num_layers):
    return Spoiled(build_ours(vocab_size, dim=dim, num_layers=num_layers))

original, calls = step_details.token_type_sums, []
def observed(token_loss, is_correct, token_types, num_types, **options):
    calls.append(1)
    if len(calls) == int(os.environ.get("FAIL_AT", 0)) and RANK == "1":
        raise ZeroDivisionError("spoiled on purpose")
    sums = original(token_loss, is_correct, token_types, num_types, **options)
    note("types", [sums.loss.tolist(), sums.num_correct.tolist(), sums.num_tokens.tolist()])
    return sums
step_details.token_type_sums = observed
"""
TYPED = """
per_source = true

[objective]
token_types = true
"""
STEPS = 5


def run_observed(directory: Path, *, code: int = 0, **switches: str) -> str:
    """On two ranks; stderr."""
    (directory / "observed.py").write_text(MODULE)
    sets = (f"train.steps={STEPS}", "model.target=observed:build", "model.contract=false")
    extra = {"PYTHONPATH": str(directory), **switches}
    return train(write_tiny_config(directory, TYPED), directory / "run", *sets, nproc=2, code=code, extra=extra)


def notes(directory: Path, name: str, rank: int) -> list[Any]:
    return [json.loads(line) for line in (directory / f"{name}.{rank}").read_text().splitlines()]


def test_a_failed_diagnostic_counts_what_the_other_ranks_measured(tmp_path):
    """Two micro-batches a step; rank 1's token types fail in the second micro-batch of step 2."""
    said = run_observed(tmp_path, FAIL_AT="4")
    assert said.count("token_type failed and is off from now on: ZeroDivisionError: spoiled") == 1
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    per_rank = [notes(tmp_path, "types", rank) for rank in range(2)]
    assert [len(each) for each in per_rank] == [2 * STEPS, 3]
    for step in range(1, STEPS + 1):
        micros = [sums for noted in per_rank for sums in noted[2 * step - 2 : 2 * step]]
        for index, name in enumerate(BytesTokenizer().token_type_names):
            loss, correct, count = (sum(sums[part][index] for sums in micros) for part in range(3))
            logged = rows["train", step].get(f"token_type/{name}/loss")
            assert logged == (pytest.approx(loss / count, rel=1e-6) if count else None), (step, name)
            if count:
                assert rows["train", step][f"token_type/{name}/accuracy"] == pytest.approx(correct / count, rel=1e-6)


def test_a_component_of_the_loss_that_fails_on_one_rank_stops_the_run_with_its_name_and_batch(tmp_path):
    output = run_observed(tmp_path, code=1, SPOIL_LOGITS_AT="4")
    output = [line for line in output.splitlines() if "ObjectiveError: objective component" in line]
    (said,) = [line for line in output if line.startswith("trainer.")]  # its own, with the traceback
    assert all("rank 1 failed" in line for line in output if line != said)
    shapes = re.search(r"objective component token_ce: logits \((\d), 15, 257\) do not fit targets \((\d), 16\)", said)
    assert shapes is not None, said
    assert shapes[1] == shapes[2]
    meta = json.loads(said.split("; batch: ", 1)[1])
    modality, stream = {"first": "a", "second": "b"}[meta["source"]], meta["stream"]
    assert list((tmp_path / "corpus" / modality).glob(Path(stream).name)), "the batch's stream is one that exists"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"].startswith("rank 1 failed: ObjectiveError: objective component token_ce")
