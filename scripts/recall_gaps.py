"""Documents of recall over long gaps, whose answers alone are trained and judged: for scripts/context.py.

A value is shown for one of four keys and asked for once, after a gap. Each pair of a key and a value has a byte of its own,
from "@" on; a question is the key, "a" to "d", and its answer a digit. All other bytes are dots. Without what was shown, an
answer costs ln 8 = 2.079 nats.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

import numpy as np

KEYS, VALUES = 4, 8
LENGTH = 16384
GAPS = {
    "gap_16": (16, 256),
    "gap_2000": (2000, 4000),
    "gap_8000": (8000, 16000),
}  # of the held-out files, drawn evenly in ln


def recall_document(draw: np.random.Generator, length: int, gaps: tuple[int, int], power: float) -> dict[str, Any]:
    """A record with the text and the spans of its answers; gaps have a density of gap ** -power."""
    low, high = (gap ** (1 - power) for gap in gaps)
    text, answers = ["."] * length, list[tuple[int, int]]()
    free = [(int(draw.integers(1, 64)), key) for key in range(KEYS)]  # a heap of (place, key)
    while free:
        shown, key = heapq.heappop(free)
        while shown < length and text[shown] != ".":
            shown += 1
        asked = shown + int((low + draw.random() * (high - low)) ** (1 / (1 - power)))
        while asked + 2 <= length and text[asked : asked + 2] != [".", "."]:
            asked += 1
        if asked + 2 > length:
            continue
        value = int(draw.integers(VALUES))
        text[shown], text[asked], text[asked + 1] = chr(ord("@") + VALUES * key + value), "abcd"[key], str(value)
        answers.append((asked + 1, asked + 2))
        heapq.heappush(free, (asked + 2 + int(draw.integers(1, 8)), key))
    return {"text": "".join(text), "answers": sorted(answers)}


def write_recall(folder: Path, documents: int = 256) -> None:
    """Eight files of so many documents to train on, and one for each range of gaps."""
    files = [(f"train/{number}", documents, LENGTH, (4, LENGTH), 1.75) for number in range(8)]
    files += [(f"eval/{gap}", count, 2 * LENGTH, GAPS[gap], 1.0001) for gap, count in zip(GAPS, (1, 6, 8), strict=True)]
    for seed, (name, count, length, gaps, power) in enumerate(files):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(seed)
        lines = (json.dumps(recall_document(draw, length, gaps, power)) for _ in range(count))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
