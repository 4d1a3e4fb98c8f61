"""Throughput of `train data tokenize` on one core, beside the package `tokenizers` alone.

Modules of Python's standard library, as JSON lines, with a byte-level BPE trained on them. Alone means: the texts are in
memory, are encoded together, and the ids are dropped. The trainer reads and parses the lines, encodes them, and writes tokens
and lengths. Both take turns, in CPU time of one process.
"""

from __future__ import annotations

import json
import os
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_table import Figure, bench_parser, in_turns, over, print_figures, ratio_figure

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

        def tokenizers_alone() -> float:
            began = time.process_time()
            for encoding in words.encode_batch_fast(documents, add_special_tokens=False):
                len(encoding.ids)
            return size / (time.process_time() - began)

        def ours() -> float:
            began = time.process_time()
            tokenize_span(job, options, np.dtype("<u2"))
            spent = time.process_time() - began
            job.part.with_suffix(".npy").unlink()
            return size / spent

        speeds = in_turns({"alone": tokenizers_alone, "ours": ours}, rounds)
    return [
        Figure("text", size, "MB"),
        Figure("tokenizers alone", float(np.median(speeds["alone"])), "MB/s"),
        Figure("train data tokenize, a process", float(np.median(speeds["ours"])), "MB/s"),
        ratio_figure("over tokenizers alone", over(speeds["ours"], speeds["alone"]), at_least=0.9),
    ]


def main() -> None:
    """Measure and print."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each, after one that warms up")
    args = parser.parse_args()
    print_figures("tokenize", figures(args.rounds), args)


if __name__ == "__main__":
    main()
