"""Real runs of three ranks in which a diagnostic or a component of the loss fails, and what a logged step communicates."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import losses, read_rows, run, write_tiny_config
from trainer.data.tokenizer import BytesTokenizer

pytestmark = pytest.mark.distributed

# Imported by the program as the model's target; it looks in on what every rank does, and spoils what it is asked to.
MODULE = '''
import json, os, sys
import torch, torch.distributed as dist
from pathlib import Path
from trainer.model import build as build_ours
from trainer.model.protocol import ModelOutput
import trainer.training.step.details as step_details

RANK = os.environ.get("RANK", "0")
FOLDER = Path(__file__).parent

def note(name, value):
    with open(FOLDER / f"{name}.{RANK}", "a") as file:
        file.write(json.dumps(value) + "\\n")

class Strict(torch.nn.Module):
    """Ours, with a forward that takes anything, so that nothing else keeps extras away from it."""
    def __init__(self, inner):
        super().__init__()
        self.inner, self.state_width, self.calls = inner, inner.state_width, 0
    def forward(self, tokens, state=None, **rest):
        note("inputs", sorted(["tokens", "state", *rest]))
        output, self.calls = self.inner(tokens, state=state), self.calls + 1
        if self.calls == int(os.environ.get("SPOIL_LOGITS_AT", 0)) and RANK == "1":
            return ModelOutput(output.logits[:, 1:], output.state)
        return output

def build(vocab_size, dim, num_layers):
    return Strict(build_ours(vocab_size, dim=dim, num_layers=num_layers))

original, calls = step_details.token_type_sums, []
def observed(token_loss, is_correct, token_types, num_types, **options):
    calls.append(1)
    if len(calls) == int(os.environ.get("FAIL_AT", 0)) and RANK == "1":
        raise ZeroDivisionError("spoiled on purpose")
    sums = original(token_loss, is_correct, token_types, num_types, **options)
    note("types", [sums.loss.tolist(), sums.num_correct.tolist(), sums.num_tokens.tolist()])
    return sums
step_details.token_type_sums = observed

def counted(name, function):
    def call(*args, **options):
        note("collectives", [name, sys._getframe(1).f_globals["__name__"]])
        return function(*args, **options)
    return call
if os.environ.get("COUNT"):
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast",
                 "broadcast_object_list", "reduce", "reduce_scatter_tensor", "gather", "gather_object", "scatter",
                 "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "send", "recv"):
        setattr(dist, name, counted(name, getattr(dist, name)))
'''
TYPED = """
per_source = true

[objective]
token_types = true
"""
STEPS = 5


def run_observed(directory: Path, *arguments: object, nproc: int, **switches: str) -> subprocess.CompletedProcess[str]:
    (directory / "observed.py").write_text(MODULE)
    config = write_tiny_config(directory, TYPED)
    line = [
        "--config",
        config,
        "--run-dir",
        directory / "run",
        "--steps",
        STEPS,
        "--set",
        "model.target=observed:build",
        "--set",
        "model.contract=false",
    ]
    return run(*line, *arguments, nproc=nproc, extra={"PYTHONPATH": str(directory), **switches})


def notes(directory: Path, name: str, rank: int) -> list[Any]:
    return [json.loads(line) for line in (directory / f"{name}.{rank}").read_text().splitlines()]


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """Three ranks, two micro-batches a step; rank 1's token types fail in the second micro-batch of step 2."""
    directory = tmp_path_factory.mktemp("spoiled")
    return directory, run_observed(directory, nproc=3, FAIL_AT="4")


def test_a_diagnostic_that_fails_on_one_rank_costs_one_warning_and_the_run_goes_on(spoiled):
    directory, result = spoiled
    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if "WARNING" in line]
    once, at_the_end = warnings
    assert once.startswith("[rank 1] WARNING token_type failed and is off from now on: ZeroDivisionError: spoiled")
    assert at_the_end.startswith("[rank 1] WARNING token_type ")
    assert [len(notes(directory, "types", rank)) for rank in range(3)] == [2 * STEPS, 3, 2 * STEPS]
    assert len(losses(directory / "run" / "metrics.jsonl")) == STEPS


def test_what_other_ranks_and_other_diagnostics_say_stays_right(spoiled, tmp_path):
    directory, _ = spoiled
    whole = run_observed(tmp_path, nproc=3)
    assert whole.returncode == 0, whole.stderr
    rows, expected = (read_rows(where / "run" / "metrics.jsonl") for where in (directory, tmp_path))
    assert rows.keys() == expected.keys()
    measured = ("time/", "smoothed/", "step_time", "tokens_per_sec", "checkpoint/", "token_type/")
    for place, row in expected.items():
        for key, value in row.items():
            if not key.startswith(measured):
                assert rows[place][key] == value, (place, key)
    assert any(key.startswith("modality/") for key in rows["train", STEPS])


def test_the_failed_diagnostic_counts_what_the_other_ranks_measured(spoiled):
    directory, _ = spoiled
    rows = read_rows(directory / "run" / "metrics.jsonl")
    per_rank = [notes(directory, "types", rank) for rank in range(3)]
    for step in range(1, STEPS + 1):
        micros = [sums for noted in per_rank for sums in noted[2 * step - 2 : 2 * step]]
        for index, name in enumerate(BytesTokenizer().token_type_names):
            loss, correct, count = (sum(sums[part][index] for sums in micros) for part in range(3))
            logged = rows["train", step].get(f"token_type/{name}/loss")
            assert logged == (pytest.approx(loss / count, rel=1e-6) if count else None), (step, name)
            if count:
                assert rows["train", step][f"token_type/{name}/accuracy"] == pytest.approx(correct / count, rel=1e-6)


def test_extras_never_reach_the_model(spoiled):
    directory, _ = spoiled
    for rank in range(3):
        seen = notes(directory, "inputs", rank)
        assert len(seen) >= 2 * STEPS
        assert all(names == ["state", "tokens"] for names in seen)


def test_a_component_of_the_loss_that_fails_on_one_rank_stops_the_run_with_its_name_and_batch(tmp_path):
    result = run_observed(tmp_path, nproc=3, SPOIL_LOGITS_AT="4")
    assert result.returncode == 1
    told = [line for line in result.stderr.splitlines() if "ObjectiveError: objective component" in line]
    (said,) = [line for line in told if line.startswith("trainer.")]  # its own, with the traceback
    assert all("rank 1 failed" in line for line in told if line != said)
    shapes = re.search(r"objective component token_ce: logits \((\d), 15, 257\) do not fit targets \((\d), 16\)", said)
    assert shapes is not None, said
    assert shapes[1] == shapes[2]
    meta = json.loads(said.split("; batch: ", 1)[1])
    modality, stream = {"first": "a", "second": "b"}[meta["source"]], meta["stream"]
    assert list((tmp_path / "corpus" / modality).glob(Path(stream).name)), "the batch's stream is one that exists"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"].startswith("rank 1 failed: ObjectiveError: objective component token_ce")


def test_a_logging_step_costs_two_collectives_and_another_step_one(tmp_path):
    result = run_observed(tmp_path, "--set", "metrics.log_interval=2", "--set", "gns.enabled=true", nproc=2, COUNT="1")
    assert result.returncode == 0, result.stderr
    logged = len(losses(tmp_path / "run" / "metrics.jsonl"))
    assert logged == 4, "steps 1, 2, 4 and the last"
    for rank in range(2):
        calls = [tuple(call) for call in notes(tmp_path, "collectives", rank)]
        steps = [index for index, (_, caller) in enumerate(calls) if caller == "trainer.training.step.step"]
        inside = Counter(calls[steps[0] : steps[-1] + 2])
        assert inside == {
            ("all_reduce", "trainer.training.step.step"): STEPS,
            ("all_gather", "trainer.metrics.aggregate"): logged,
        }
