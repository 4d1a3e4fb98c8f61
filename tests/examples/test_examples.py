"""Every program under examples/ runs as its README says, and shows what it claims to show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.in_process import program, train_here
from tests.support.runs import EXAMPLES, ROOT, environment, printed_by, read_rows, run, run_example
from tests.support.wandb_file import read_history


def test_the_readme_lists_every_example_and_nothing_else():
    listed = set(re.findall(r"^\| \[([^]]+)\]\(", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M))
    there = {path.name for path in EXAMPLES.glob("*.py")} | {f"{p.name}/" for p in EXAMPLES.iterdir() if p.is_dir()}
    assert listed == {name for name in there if not name.startswith("__pycache__")}


def ledger_lines(printed: str) -> list[tuple[float, int, int]]:
    """(loss, cold starts, dropped too early) of each line."""
    found = re.findall(r"loss ([\d.]+) in cell [123], cold starts (\d+), dropped while still needed (\d+)", printed)
    return [(float(loss), int(cold), int(dropped)) for loss, cold, dropped in found]


def test_the_ledger_carries_the_key_and_counts_the_states_that_it_lost():
    kept = ledger_lines(printed_by("ledger_gru.py", "--steps", 120))
    assert len(kept) == 3
    assert [cold for _, cold, _ in kept] == [0, 0, 0]
    assert kept[-1][0] < 0.3
    lost = ledger_lines(printed_by("ledger_gru.py", "--steps", 120, "--capacity", 8))
    assert all(cold > 0 and dropped > 0 for _, cold, dropped in lost)
    assert lost[-1][0] > 2.0  # chance is log 16 = 2.77


def test_the_tracker_writes_one_record_three_ways(tmp_path):
    result = run_example("tracker_wandb.py", "--out", tmp_path, "--steps", 20)
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert list(rows) == [("train", 1), ("train", 10), ("train", 20), ("eval", 20)]
    assert rows["train", 20]["loss"] < rows["train", 1]["loss"]
    assert rows["train", 20]["time/forward_backward_sec"] > 0
    assert result.stdout == (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    (offline,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert [row["global_step"] for row in read_history(offline)] == [1, 10, 20]
    again = run_example("tracker_wandb.py", "--out", tmp_path, "--steps", 20)
    assert (again.returncode, "holds a record already" in again.stderr) == (1, True)
    assert result.stdout == (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")


def test_the_blend_follows_its_schedule():
    printed = printed_by("blend_iterable_datasets.py", "--batches", 400)
    easy = [int(count) for count in re.findall(r"easy (\d+)", printed)]
    assert sum(easy) + sum(map(int, re.findall(r"hard (\d+)", printed))) == 400
    assert easy[0] > 60 > 50 > easy[3]
    assert float(printed.split("share error: ")[1]) < 0.05


PAYLOADS = """\
{"schema_version": 1, "mode": "train", "global_step": 1, "metrics": {"loss": 3.0}}
[default0]: {"schema_version": 1, "mode": "train", "global_step": 2, "metrics": {"loss": 0.5}}
{"schema_version": 1, "mode": "train", "global_step": 1, "metrics": {"loss": 3.0}, "restart": {"from_step": 0}}
{"schema_version": 1, "mode": "train", "global_step": 2, "metrics": {"loss": 0.6}}
{"schema_version": 1, "mode": "train", "global_step": 2, "metrics": {"loss": 2.0}, "restart": {"from_step": 1}}
{"schema_version": 1, "mode": "eval", "global_step": 2, "metrics": {"eval_loss": 0.1}}
{"schema_version": 1, "mode": "train", "global_step": 3, "metrics": {"lr": 0.1}, "non_finite": {"loss": "nan"}}
"""


def test_the_consumer_needs_the_standard_library_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(PAYLOADS, encoding="utf-8")
    for argument in (str(path), "-"):
        line = [sys.executable, "-S", str(EXAMPLES / "read_payloads.py"), argument]  # without what is installed
        env = environment({"PYTHONPATH": str(ROOT)})
        result = subprocess.run(line, input=PAYLOADS, env=env, capture_output=True, text=True, check=True)
        assert result.stdout == "step 3: not finite: loss\n2 logged steps; last 2: 2.0000; lowest 2: 2.0000\n"
    assert len((EXAMPLES / "read_payloads.py").read_text(encoding="utf-8").splitlines()) <= 30


def test_own_parts_train_by_import_path(tmp_path, monkeypatch, capsys):
    own = EXAMPLES / "own_parts"
    config = ["--config", "own.toml", "--run-dir", tmp_path / "run", "--steps", "40"]
    result = run(*config, cwd=own)
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert rows["train", 40]["loss"] < 0.7 * rows["train", 1]["loss"]
    assert rows["train", 40]["ledger/cold_starts"] == 0
    assert 0 <= rows["train", 40]["my/saturation"] <= 1
    monkeypatch.chdir(own)
    spoken = program(["sample", tmp_path / "run", "--prompt", "Iron, ", "--tokens", 20, "--trust-code"], capsys)
    assert spoken.returncode == 0, spoken.stderr
    assert spoken.stdout.startswith("Iron, ")
    assert not list(own.glob("runs*")), "a run must not leave files among the examples"


@pytest.mark.slow
def test_a_balance_loss_keeps_the_experts_of_the_mixture_busy(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES / "own_parts")
    rows = {}
    for weight in (0, 0.02):
        sets = (f"objective.losses.balance={weight}", "train.steps=60")
        train_here(Path("experts.toml"), tmp_path / str(weight), *sets)
        rows[weight] = read_rows(tmp_path / str(weight) / "metrics.jsonl")
    assert 0 < rows[0.02]["train", 60]["moe/router_entropy"] < 1.39
    held_out = rows[0.02]["eval", 60]
    assert held_out["eval_loss"] == pytest.approx(
        held_out["eval_objective/token_ce"] + held_out["eval_objective/balance"]
    )
    assert held_out["eval_moe/max_share"] < 0.75 < rows[0]["eval", 60]["eval_moe/max_share"]


def test_the_format_of_one_s_own_gives_the_column(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_parts"))
    from trainer.data import BytesTokenizer, ReadOptions, load_documents

    tokenizer = BytesTokenizer()
    path = Path(EXAMPLES / "own_parts/tables/elements/part0.csv")
    documents = load_documents(path, ReadOptions(tokenizer, format="my_parts:load_csv"))
    first = torch.as_tensor(documents.read(0, 0, int(documents.lengths[0])))
    assert bytes(first.tolist()).decode() == "Hydrogen, symbol H, is element number 1: its atom has 1 proton."


def test_a_model_that_forgets_is_told_from_one_that_carries() -> None:
    lines = printed_by("model_contract.py").splitlines()
    assert any(line.startswith("carry") and "broken" in line and "differ from the uncut row" in line for line in lines)
