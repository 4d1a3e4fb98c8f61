"""The loops under examples/loops, and the page that shows them, measure what their frameworks really do."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT, read_rows, run, run_example
from trainer.metrics.payload_contract import validate_stream

LOOPS = ROOT / "examples" / "loops"
TIMES = re.compile("time|tokens_per_sec")


def needs(*names: str):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


NEEDS = {
    "plain_pytorch": [],
    "with_accelerate": [needs("accelerate")],
    "with_lightning": [needs("lightning")],
    "with_hf_trainer": [needs("accelerate", "transformers")],
}
OWN_STEP = ("with_accelerate", "with_lightning")
CASES = {"whole": (22, 4096), "short window": (3, 80), "short batch": (2, 60)}
"""Steps, and rows of an epoch."""
ONLY = {"plain_pytorch": "whole", "with_hf_trainer": "short batch"}


def each(names: Iterable[str], *quick: str):
    """Each loop as a case; those that are not `quick`, if any is, run with the slow tests: a start imports a framework."""
    cases = [(name, [*NEEDS[name], *[pytest.mark.slow] * (name not in (quick or NEEDS))]) for name in names]
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in cases])


def numbers(out: Path) -> dict[int, dict[str, float]]:
    """Step -> everything that does not depend on the clock."""
    rows = read_rows(out / "metrics.jsonl")
    return {
        step: {key: value for key, value in row.items() if not TIMES.search(key)}
        for (mode, step), row in rows.items()
        if mode == "train"
    }


IN_TURN = """
import json, os, runpy, sys
script, out, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, os.path.dirname(script))
import task, torch
for name, (steps, rows) in cases.items():
    os.mkdir(os.path.join(out, name))
    os.chdir(os.path.join(out, name))
    task.Counting.__len__ = lambda self: rows
    sys.argv = [script, "--out", ".", "--steps", str(steps)]
    runpy.run_path(script, run_name="__main__")
os.mkdir(os.path.join(out, "own"))
os.chdir(os.path.join(out, "own"))
task.Counting.__len__ = lambda self: 4096
names = runpy.run_path(script)
out, rows = names["Path"](), torch.utils.data.Subset(task.Counting(), range(60))
torch.manual_seed(0)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What a loop leaves in a directory for each of `CASES`, and one's own program around it: in one process, started once."""

    @cache
    def run_in_turn(name: str) -> tuple[Path, str]:
        out = tmp_path_factory.mktemp(name)
        cases = {case: each for case, each in CASES.items() if case == ONLY.get(name, case)}
        done = run(
            LOOPS / f"{name}.py", out, json.dumps(cases), code=IN_TURN + OWN.get(name, ""), cwd=out, is_alone=True
        )
        assert done.returncode == 0, done.stderr
        return out, done.stdout

    return run_in_turn


@each(OWN_STEP)
def test_every_framework_measures_what_the_plain_loop_does(name, made):
    """Same model, data and optimizer: loss, gradient norm, noise scale and its bounds are those of the plain loop."""
    plain, found = (numbers(made(each)[0] / "whole") for each in ("plain_pytorch", name))
    assert found.keys() == plain.keys() == {1, 10, 20, 22}  # the last step is in the record
    for step, row in plain.items():
        assert found[step].keys() == row.keys()
        assert found[step] == pytest.approx(row, rel=1e-5)
    assert plain[20]["gns/b_simple_low"] > 0


@each(OWN_STEP)
def test_a_short_window_at_the_end_of_an_epoch_is_left_out(name, made):
    """Two whole windows of 4 micro-batches, and 2 micro-batches that are left for the third step."""
    last = numbers(made(name)[0] / "short window")[3]
    assert last["tokens_in_step"] == 16 * 15
    assert last["gns/b_big"] == 32  # of the last whole window
    assert last["gns/skipped"] == 0
    assert last["loss"] == pytest.approx(last["smoothed/loss"], rel=0.2)  # its own mean, not a sum over 4


@each((*OWN_STEP, "with_hf_trainer"))
def test_an_epoch_s_last_micro_batch_counts_the_rows_it_has(name, made):
    """60 rows in micro-batches of 8 and windows of 4: the second step, which is the last of the run, has 28 rows."""
    found = numbers(made(name)[0] / "short batch")
    assert {step: row["tokens_in_step"] for step, row in found.items()} == {1: 32 * 15, 2: 28 * 15}
    assert found[2]["tokens_seen"] == 60 * 15
    # 1 / sum(factor^2 / rows); the Trainer's factors on a shorter micro-batch are others, and the window is not measured.
    measured = {1: 32} if name == "with_hf_trainer" else {1: 32, 2: 1 / (3 / 16 / 8 + 1 / 16 / 4)}
    assert {step: row["gns/b_big"] for step, row in found.items() if "gns/b_big" in row} == pytest.approx(measured)


def test_a_loop_that_fails_says_so_in_its_status(tmp_path):
    prelude = "from trainer.metrics.tracker import MetricsTracker\ndef fail(*_, **__): raise ValueError('broken')\n"
    prelude += "MetricsTracker.end_step = fail"
    done = run_example("loops/plain_pytorch.py", "--out", tmp_path, "--steps", 2, prelude=prelude)
    assert done.returncode == 1
    status = json.loads((tmp_path / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["reason"]) == ("failed", "ValueError: broken")


@pytest.mark.distributed
@each(NEEDS, "plain_pytorch")
def test_two_ranks_are_one_run_whose_ranks_read_different_data(name, tmp_path):
    done = run_example(f"loops/{name}.py", "--out", tmp_path, nproc=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "status.json").read_text(encoding="utf-8"))["state"] == "done"
    rows = numbers(tmp_path)
    row = rows[max(rows)]
    assert row["gns/b_big"] == 64  # 2 ranks, 4 micro-batches of 8 rows
    assert row["tokens_in_step"] == 64 * 15
    assert row["gns/consistency"] == pytest.approx(1.0, abs=4 * row["gns/consistency_se"])


def test_the_record_is_a_run_that_the_other_verbs_read(made, capsys):
    run_dir = made("plain_pytorch")[0] / "whole"
    assert [*validate_stream((run_dir / "metrics.jsonl").read_bytes().splitlines())] == []
    assert "every logged loss and gradient norm was finite" in program(["diagnose", run_dir], capsys).stdout


def blocks(language: str) -> list[str]:
    """The code blocks of the page."""
    page = (ROOT / "docs" / "your_loop.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def test_the_page_shows_lines_of_the_program():
    shown = next(block for block in blocks("python") if block.startswith("# examples/"))
    path, *lines = shown.removeprefix("# ").splitlines()
    program_lines = {line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()}
    assert {line.strip() for line in lines} <= program_lines
    assert sum("# GNS" in line or "# REC" in line for line in program_lines) <= 20
    assert sum("# GNS" in line or "# REC" in line for line in lines) == sum(
        "# GNS" in line or "# REC" in line for line in program_lines if "tokens = " not in line
    )


FREE_KEYS = """
import logging, pathlib, sys
from trainer.metrics.tracker import MetricsTracker
from trainer.metrics.sinks import JsonlSink
{declaration}
tracker = MetricsTracker(num_devices=1, device="cpu", sinks=[JsonlSink(pathlib.Path("metrics.jsonl"))])
for step in (1, 2):
    tracker.start_step()
    tracker.end_step(step, loss=1.0, grad_norm=None, lr=0.1, tokens_in_step=1, extra={{"router/entropy": 0.5}}, force_log=True)
tracker.close()
"""


def test_a_declared_metric_of_one_s_own_is_logged_without_a_warning(tmp_path):
    code = FREE_KEYS.format(declaration=next(block for block in blocks("python") if "register(" in block))
    done = run(code=code, cwd=tmp_path, is_alone=True)
    assert done.returncode == 0, done.stderr
    assert "router/entropy" not in done.stderr
    assert [row["router/entropy"] for row in read_rows(tmp_path / "metrics.jsonl").values()] == [0.5, 0.5]


OWN_HF = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
def trainer(**changed):
    settings = dict(output_dir=str(out), max_steps=5, per_device_train_batch_size=8, gradient_accumulation_steps=4,
        learning_rate=1e-3, logging_steps=3, eval_strategy="steps", eval_steps=2, save_strategy="no", report_to="none",
        max_grad_norm=0, logging_nan_inf_filter=False, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False)
    return Trainer(model, TrainingArguments(**settings | changed), train_dataset=rows, eval_dataset=rows,
        callbacks=[names["Measure"](out)])
result = {"refused": {}, "evaluations": {}}
for setting, value in (("logging_nan_inf_filter", True), ("max_grad_norm", 1.0), ("logging_strategy", "epoch")):
    try:
        trainer(**{setting: value}).train()
    except ValueError as refusal:
        result["refused"][setting] = str(refusal)
own = trainer()
own.evaluate()  # before training: there is no record yet
own.train()
for row in own.state.log_history:
    if "eval_loss" in row and row["step"]:
        result["evaluations"][row["step"]] = row["eval_loss"]
print("RESULT", json.dumps(result))
"""
OWN_LIGHTNING = """
import lightning
class Own(names["Module"]):
    def training_step(self, batch):
        self.log("learning_rate", 0.0)  # belongs to no evaluation
        return super().training_step(batch)
    def validation_step(self, batch, index):
        loss = super().training_step(batch)
        result["evaluations"].setdefault(self.trainer.global_step, []).append((loss.item(), len(batch["labels"])))
        self.log("val_loss", loss)
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
result = {"evaluations": {}}
loader = torch.utils.data.DataLoader(rows, 8)
own = lightning.Trainer(accelerator="cpu", devices=1, max_steps=5, accumulate_grad_batches=4, log_every_n_steps=3,
    val_check_interval=8, callbacks=[names["Measure"](out)], logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False)
own.validate(Own(), loader)  # before training: there is no record yet
own.fit(Own(), loader, loader)
result["evaluations"] = {step: sum(loss * n for loss, n in seen) / sum(n for _, n in seen)
    for step, seen in result["evaluations"].items() if step}
print("RESULT", json.dumps(result))
"""
OWN = {"with_hf_trainer": OWN_HF, "with_lightning": OWN_LIGHTNING}
"""Programs of one's own around the callback of a loop."""


@each(OWN)
def test_a_callback_records_the_rate_of_each_step_and_the_evaluations(name, made):
    """A rate that falls from 1e-3 to 0 in 5 steps; two steps per epoch, an evaluation after each epoch."""
    out, said = made(name)
    result = json.loads(said.split("RESULT ")[1])
    found = numbers(out / "own")
    assert {step: row["lr"] for step, row in found.items()} == pytest.approx({1: 1e-3, 3: 6e-4, 5: 2e-4})
    rows = read_rows(out / "own" / "metrics.jsonl")
    evaluations = {step: row for (mode, step), row in rows.items() if mode == "eval"}
    expected = {int(step): pytest.approx({"eval_loss": loss}) for step, loss in result["evaluations"].items()}
    assert evaluations == expected
    assert evaluations.keys() >= {2, 4}
    for setting, message in result.get("refused", {}).items():
        assert message.startswith(f"set TrainingArguments({setting}=")
    assert len(result.get("refused", {})) == (3 if name == "with_hf_trainer" else 0)
