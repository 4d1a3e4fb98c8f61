"""Throughput of `train data tokenize` on one core, beside the package `tokenizers` alone.

Modules of Python's standard library, as JSON lines, with a byte-level BPE trained on them. Alone means: the texts are in
memory, are encoded together, and the ids are dropped. The trainer reads and parses the lines, encodes them, and writes tokens
and lengths. Both take turns, in CPU time of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench_table import Figure, print_figures, ratio_figure

from trainer.data.documents import ReadOptions
from trainer.data.tokenize import Job, tokenize_span
from trainer.data.tokenizer import load_tokenizer

MOST_BYTES = 6_000_000
VOCABULARY = 8_000


def texts() -> list[str]:
    """Modules of the standard library, in the order of their names."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found.append(path.read_text(encoding="utf-8"))
        if sum(map(len, found)) > MOST_BYTES:
            break
    return found


def figures(rounds: int) -> list[Figure]:
    """Megabytes per second of CPU time, and their ratio."""
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    documents = texts()
    size = sum(len(text.encode()) for text in documents) / 1e6
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    learn = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(documents, learn)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        words.save(str(at / "tokenizer.json"))
        lines = at / "text.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        options = ReadOptions(load_tokenizer(str(at / "tokenizer.json")))
        job = Job(str(lines), "jsonl", (0, lines.stat().st_size), at / "part.bin")
        alone: list[float] = []
        ours: list[float] = []
        for turn in range(rounds + 1):
            began = time.process_time()
            for encoding in words.encode_batch_fast(documents, add_special_tokens=False):
                len(encoding.ids)
            middle = time.process_time()
            tokenize_span(job, options, np.dtype("<u2"))
            ended = time.process_time()
            job.part.with_suffix(".npy").unlink()
            if turn:
                alone.append(size / (middle - began))
                ours.append(size / (ended - middle))
    ratios = [own / other for own, other in zip(ours, alone, strict=True)]
    return [
        Figure("text", size, "MB"),
        Figure("tokenizers alone", float(np.median(alone)), "MB/s"),
        Figure("train data tokenize, a process", float(np.median(ours)), "MB/s"),
        ratio_figure("over tokenizers alone", ratios, at_least=0.9),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; exits with 1 when --check is given and a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each, after one that warms up")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every goal is met")
    args = parser.parse_args(argv)
    print_figures("tokenize", figures(args.rounds), as_json=args.json, check=args.check)


if __name__ == "__main__":
    main()
