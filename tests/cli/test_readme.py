"""What README shows works as it stands there."""

from __future__ import annotations

import re

import numpy as np
import torch

from tests.support.runs import ROOT, make_corpus, read_rows, run
from trainer.metrics.payload_contract import build_payload, encode_payload

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRU(3, 256, batch_first=True)

    def forward(self, tokens, state):
        output, last = self.cell(tokens, state[None])
        return output, last[0]


def test_the_python_blocks_run(capsys):
    model = torch.nn.Linear(3, 1)
    data = torch.randn(4, 2, 3)
    names = {
        "ddp_model": model,
        "m": 4,
        "batch": data,
        "batch_size": 2,
        "loss_of": lambda batch: model(batch).square().mean(),
        "step": 1,
        "group_ids": np.array([5, 6]),
        "cell_index": np.array([0, 1]),
        "is_last": np.array([False, False]),
        "model": Recurrent(),
        "tokens": torch.randn(2, 4, 3),
        "loss": lambda output: output.sum(),
        "easy": [{"tokens": np.zeros((1, 2))}],
        "hard": [{"tokens": np.ones((1, 2))}],
        "line": encode_payload(build_payload("train", 3, {"loss": 2.5})),
    }
    found = blocks("python")
    assert len(found) == 4
    for block in found:
        exec(compile(block, "README.md", "exec"), names)
    assert names["ledger"].drain_metrics()["ledger/cold_starts"] == 1
    assert len(list(names["blend"])) == 2
    assert "3 2.5" in capsys.readouterr().out


def test_the_shortest_config_trains_on_a_corpus_of_one_s_own(tmp_path):
    files = tmp_path / "files"
    make_corpus(files)
    (files / "a" / "note.txt").write_text("A note in plain words. " * 50)
    glob = f"words={files}/**/*.*"
    built = run("data", "build", "text", "--out", "data/mine", "--modality", glob, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (config,) = blocks("toml")
    (tmp_path / "mine.toml").write_text(config)
    small = ["--steps", "20", "--set", "model.dim=16", "--set", "data.seq_len=16", "--set", "eval.every=10"]
    result = run("--config", "mine.toml", *small, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    rows = read_rows(run_dir / "metrics.jsonl")
    assert rows["train", 20]["loss"] < rows["train", 1]["loss"]
    assert "eval_loss" in rows["eval", 20]


def test_links_lead_somewhere():
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        ROOT / "examples/README.md",
    ]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
