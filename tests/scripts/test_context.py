"""The study of docs/context.md: its synthetic documents, its intervals, and all of it in miniature."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))  # as for a program of that directory
import context
import context_tables
import recall_gaps


@pytest.mark.parametrize(("gaps", "power"), [((4, 3000), 1.75), ((1000, 2000), 1.0001)])
def test_each_answer_is_what_was_last_shown_for_its_key_a_gap_before(gaps: tuple[int, int], power: float):
    record = recall_gaps.recall_document(np.random.default_rng(0), 8000, gaps, power)
    text, shown, found = record["text"], dict[str, tuple[int, int]](), list[int]()
    answers = [start for start, end in record["answers"] if end == start + 1]
    assert len(answers) == len(record["answers"]) > 10
    for place, byte in enumerate(text):
        if "@" <= byte <= "_":
            key, value = divmod(ord(byte) - ord("@"), recall_gaps.VALUES)
            shown["abcd"[key]] = place, value
        elif byte in "abcd":
            since, value = shown.pop(byte)  # nothing is asked for twice
            assert text[place + 1] == str(value)
            assert place + 1 in answers
            found.append(place - since)
    assert len(found) == len(answers)
    assert gaps[0] <= min(found)
    assert max(found) <= gaps[1] + 50  # put off where the place is taken


def test_intervals_hold_the_truth_and_a_share_is_that_of_the_gains():
    draw, held = np.random.default_rng(0), 0
    tokens = draw.uniform(100, 1000, 40)
    for _ in range(400):
        of_documents, of_seeds = draw.normal(0, 0.1, 40), draw.normal(0, 0.02, (3, 1))
        value, half = context_tables.interval((1.0 + of_documents + of_seeds) * tokens, tokens)
        held += abs(value - 1.0) <= half
    assert 0.93 <= held / 400 <= 0.995

    def runs(loss: float) -> list[dict[str, object]]:
        nats = (loss + draw.normal(0, 0.003, (3, 1))) * tokens + draw.normal(0, 0.2, (3, 40))
        return [{"documents": list(zip(tokens, row, strict=True))} for row in nats]

    share, low, high = map(int, re.findall(r"-?\d+", context_tables.recovered(runs(2.0), runs(1.85), runs(1.8))))
    assert low < 75 < high
    assert abs(share - 75) < 6
    assert context_tables.recovered(runs(2.0), runs(1.85), runs(2.0)).startswith("undefined")


@pytest.mark.slow
def test_a_small_study_gives_every_figure_of_its_tables(tmp_path: Path, monkeypatch, capsys):
    corpus, work = tmp_path / "corpus" / "text", tmp_path / "work"
    corpus.mkdir(parents=True)
    for number in range(4):
        lines = (json.dumps({"text": f"{number} {line} " + "words of a long document " * 40}) for line in range(200))
        (corpus / f"{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr(context, "write_recall", lambda folder: recall_gaps.write_recall(folder, documents=4))
    monkeypatch.setitem(context.SIZES, "tiny", replace(context.SIZES["tiny"], families=("rglru",), lrs=(1e-3,)))
    words = ["--text", corpus.parent, "--work", work, "--out", work / "out.json", "--size", "tiny", "--json"]
    monkeypatch.setattr(sys, "argv", ["context.py", *map(str, words)])
    context.main()
    text, longer, recall = json.loads(capsys.readouterr().out)["tables"]
    assert [row[0] for row in text["rows"]] == ["256, shuffled", "256, carried", "4,096, shuffled"]
    for row in text["rows"] + longer["rows"] + recall["rows"]:
        assert all(math.isfinite(float(number)) for cell in row[1:] for number in re.findall(r"[\d.]+|nan", cell))
    kept = [float(row[-1]) for row in text["rows"]]
    assert kept[2] == pytest.approx(16 * kept[0], rel=0.1)
