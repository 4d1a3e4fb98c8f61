"""Loss against depth: that of uncut documents, and of cells from zero by brute force, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.core.training.test_evaluation import evaluate, from_zero
from tests.support import in_process
from tests.support.runs import held_out_texts, write_tiny_config
from trainer.distributed.env import RankInfo
from trainer.lab import moments
from trainer.lab.depth import depths
from trainer.metrics.catalog import is_known, lookup
from trainer.metrics.noise_scale import t_quantile
from trainer.tools import evaluation_sample
from trainer.tools.evaluation_sample import Sample
from trainer.training.build import make_model
from trainer.training.evaluator import eval_sets
from trainer.training.plan import Plan

CPU, FRACTION, CELL = torch.device("cpu"), 0.5, 16
SETTINGS = (
    f"eval.holdout_fraction={FRACTION}",
    "eval.every=1",
    "eval.depth=true",
    "eval.batches=100000",
    "data.max_group_cells=64",
    "ledger.capacity=4096",
)


def plan_of(directory: Path, *overrides: str) -> Plan:
    return in_process.plan_of(write_tiny_config(directory), *SETTINGS, *overrides)


def model_of(plan: Plan) -> torch.nn.Module:
    torch.manual_seed(0)
    return make_model(plan).double().eval()


def evaluated(plan: Plan, model: torch.nn.Module, sets=(), **parts):
    return evaluate(plan, model, sets or eval_sets(plan, RankInfo(), CPU), **parts)


def by_depth(found: dict[str, float]) -> dict[str, float]:
    return {key.removeprefix("eval/depth/"): value for key, value in found.items() if key.startswith("eval/depth/")}


def token_losses(plan: Plan, model: torch.nn.Module, text: bytes, size: int) -> np.ndarray:
    """Of each byte of a document, in pieces of so many, each from a zero state."""
    pieces = from_zero(plan, model, text, size)
    return torch.cat([F.cross_entropy(logits, wanted, reduction="none") for logits, wanted in pieces]).numpy()


def expected(parts: list[tuple[np.ndarray, np.ndarray]], cell: int) -> dict[str, float]:
    """What must come out, from (carried losses, losses by cell) of each document."""
    found = {}

    def put(key: str, low: int, high: float, pick) -> None:
        units = []
        for each in parts:
            losses = pick(*(losses[low : int(min(high, len(losses)))] for losses in each))
            if count := np.count_nonzero(~np.isnan(losses)):  # NaN: not trained
                units.append((np.nansum(losses), count))
        if not units:
            return
        sums, counts = np.array(units).T
        ratio = sums.sum() / counts.sum()
        found[key] = ratio
        num = counts.sum() ** 2 / np.square(counts).sum()
        if len(units) > 4 and num >= 2:
            error = math.sqrt(np.square(sums - ratio * counts).sum() * num / (num - 1)) / counts.sum()
            found[f"{key}_se"] = error * t_quantile(1.96, num - 1) / 1.96

    kinds = {"loss": lambda c, z: c, "loss_from_zero": lambda c, z: z, "carry_gain": lambda c, z: z - c}
    longest = max(len(carried) for carried, _ in parts)
    for low, high in ((0, 1), *((2**k, 2 ** (k + 1)) for k in range(20))):
        for name, pick in kinds.items():
            if low < longest and (name == "loss" or high > cell):
                put(f"{low}/{name}", low, high, pick)
    put("beyond_cell/carry_gain", cell, math.inf, kinds["carry_gain"])
    return found


def parts_of(plan: Plan, model: torch.nn.Module, texts: list[bytes], cell: int):
    """(carried losses, losses by cell) of each document."""
    return [tuple(token_losses(plan, model, text, size) for size in (len(text), cell)) for text in texts]


@pytest.mark.parametrize(
    ("cell", "overrides"),
    [
        (16, ("objective.z_loss=0.1", "objective.chunk_tokens=16")),
        (24, ("data.seq_len=24",)),
        (16, ("data.max_group_cells=3",)),
    ],
    ids=["chunked_z", "not_a_power", "cut"],
)
def test_every_number_is_that_of_uncut_documents_and_of_cells_from_zero(tmp_path, cell, overrides):
    plan = plan_of(tmp_path, *overrides)
    model = model_of(plan)
    found = by_depth(evaluated(plan, model))
    texts = held_out_texts(tmp_path, FRACTION)
    assert max(map(len, texts)) > 16 * CELL
    wanted = expected(parts_of(plan, model, texts, cell), cell)  # no evaluation cuts them
    assert found == pytest.approx(wanted, abs=1e-6)
    assert all(is_known(f"eval/depth/{key}") and is_known(f"eval/books/depth/{key}") for key in found)
    assert lookup("eval/depth/64/loss_se").ranks == "max"


def test_of_a_sample_they_are_those_of_the_drawn_documents(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, "eval.batches=60", "objective.z_loss=0")
    model, seen, original = model_of(plan), [], Sample.error
    monkeypatch.setattr(Sample, "error", lambda self, *sums: seen.append(sums) or original(self, *sums))
    found = by_depth(evaluated(plan, model))
    ((losses, sizes),) = seen
    left = parts_of(plan, model, held_out_texts(tmp_path, FRACTION), CELL)
    assert 8 < len(sizes) < len(left)
    chosen = []
    for length, loss in zip(sizes.tolist(), losses.tolist(), strict=True):
        at = min(range(len(left)), key=lambda i: (len(left[i][0]) != length, abs(left[i][0].sum() - loss)))
        chosen.append(left.pop(at))
        assert chosen[-1][0].sum() == pytest.approx(loss, abs=1e-5)
    assert found == pytest.approx(expected(chosen, CELL), abs=1e-6)


def test_of_masks_they_are_those_of_the_trained_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    texts = ["".join(random.choice([*"abcde "], size=size)) for size in (5, 40, 70, 120, 33, 90, 16, 200)]
    spans = [[[size // 4, size // 2], [size - 2, size]] for size in map(len, texts)]
    lines = [json.dumps({"text": text, "mask": mask}) for text, mask in zip(texts, spans, strict=True)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    sets = "eval.source=[{name='chat', paths=['chat.jsonl'], loss_mask='mask'}]", "objective.z_loss=0"
    plan = plan_of(tmp_path, "eval.holdout_fraction=0", *sets)
    model = model_of(plan)
    found = evaluated(plan, model)
    parts = parts_of(plan, model, [text.encode() for text in texts], CELL)
    for each, mask in zip(parts, spans, strict=True):
        for losses in each:
            losses[[not any(start <= at < end for start, end in mask) for at in range(len(losses))]] = np.nan
    depth = {key.removeprefix("eval/chat/depth/"): value for key, value in found.items() if "/depth/" in key}
    assert depth == pytest.approx(expected(parts, CELL), abs=1e-6)
    carried = np.concatenate([losses for losses, _ in parts])
    assert found["eval/chat/loss"] == pytest.approx(np.nanmean(carried), abs=1e-6)


def test_documents_of_drawn_files_are_added_up_by_file(tmp_path, monkeypatch):
    sizes = [file.stat().st_size for file in (write_tiny_config(tmp_path).parent / "corpus").rglob("*.jsonl")]
    monkeypatch.setattr(evaluation_sample, "COUNTED_BYTES", sum(sizes) / 2)
    monkeypatch.setattr(evaluation_sample, "LEAST", 4)
    monkeypatch.setattr(moments, "FEWEST_UNITS", 2)
    plan = plan_of(tmp_path, "eval.batches=40")
    one = by_depth(evaluated(plan, model_of(plan)))
    (drawn,) = eval_sets(plan, RankInfo(), CPU)
    drawn.sample.units.update(dict.fromkeys(drawn.sample.units, 0))  # of one file: nothing is known of the error
    assert one["beyond_cell/carry_gain_se"] > 0
    wide = by_depth(evaluated(plan, model_of(plan), sets=[drawn]))
    assert "beyond_cell/carry_gain_se" not in wide
    assert wide["beyond_cell/carry_gain"] == pytest.approx(one["beyond_cell/carry_gain"], abs=1e-9)
    for limit in ("COUNTED_BYTES", "LEAST"):  # the first file has no held-out document
        monkeypatch.setattr(evaluation_sample, limit, 1)
    assert "in 2 files" in eval_sets(plan_of(tmp_path, "eval.holdout_fraction=0.07"), RankInfo(), CPU)[0].read


def test_nothing_is_reported_of_documents_within_a_cell_or_if_it_is_off(tmp_path):
    short = plan_of(tmp_path, "data.seq_len=1024")
    assert by_depth(evaluated(short, model_of(short))) == {}
    off = plan_of(tmp_path, "eval.depth=false")
    assert by_depth(evaluated(off, model_of(off))) == {}
    on = plan_of(tmp_path)
    same = evaluated(on, model_of(on))
    assert {key: value for key, value in same.items() if "depth" not in key} == evaluated(off, model_of(off))


def test_depth_counts_from_the_last_reset():
    resets = torch.tensor([[False, False, True, False], [True, False, False, True]])
    assert depths(torch.tensor([12, 0]), 4, None).tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]]
    assert depths(torch.tensor([12, 0]), 4, resets).tolist() == [[12, 13, 0, 1], [0, 1, 2, 0]]
