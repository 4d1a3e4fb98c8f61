"""`train data synth`: corpora that are made up, to show something that real text would hide."""

from __future__ import annotations

import math
from pathlib import Path

import typer

from trainer.data.corpus.key_recall import NUM_SYMBOLS, build_key_recall


def synth_key_recall(out: str, *, groups: int, cells: int, seq_len: int, streams: int, seed: int, force: bool) -> None:
    """Write the key-recall corpus, and say what losses to expect on it."""
    manifest = build_key_recall(
        Path(out), groups=groups, cells=cells, seq_len=seq_len, streams=streams, seed=seed, force=force
    )
    totals = manifest.totals()
    typer.echo(
        f"{totals['documents']:,} groups of {cells} cells of {seq_len} bytes, {totals['streams']} streams", err=True
    )
    asked = math.log(NUM_SYMBOLS)
    floor = 2 * asked / (cells * seq_len)
    typer.echo(f"token_type/digit/loss: at least {asked:.3f} without carried state, 0 with it", err=True)
    typer.echo(f"loss over all bytes with carried state: at least {floor:.4f}", err=True)
    typer.echo(f"the corpus is in {out}; train with data.seq_len = {seq_len}", err=True)
