"""`train export`: a run's weights or metrics in formats that other programs read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.cli.options import TrustOption
from trainer.cli.terminal import echo
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.tools.runs.load import RunRecord


class ExportFormat(StrEnum):
    """Formats of an export."""

    safetensors = "safetensors"
    hf = "hf"
    csv = "csv"
    parquet = "parquet"
    tensorboard = "tensorboard"


SUFFIXES = {".csv": ExportFormat.csv, ".parquet": ExportFormat.parquet}
"""Of a file to write -> the format without `--format`."""


def export(
    run_dir: Annotated[
        str, typer.Argument(help="A run directory; for metrics also a metrics.jsonl.", metavar="RUN_DIR")
    ],
    out: Annotated[str, typer.Option(help="File (csv, parquet) or directory (the others) to write.", metavar="PATH")],
    format: Annotated[
        ExportFormat | None,
        typer.Option(
            help="Weights: safetensors; hf, for from_pretrained. Metrics: csv, parquet, tensorboard. Default: csv or parquet "
            "if PATH ends so, otherwise safetensors."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Weights: step of the checkpoint; default: the newest.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    trust_code: TrustOption = False,
) -> None:
    """Write a run's weights (safetensors with a model card, or as Hugging Face's) or metrics (CSV, Parquet, TensorBoard)."""
    target = Path(out)
    if format is None:
        format = SUFFIXES.get(target.suffix, ExportFormat.safetensors)
        others = ", ".join(each for each in ExportFormat if each is not format)
        echo(f"no --format: writing {format.value}; the others: {others}", err=True)
    if target.exists() and not force:
        raise UserError(out, "exists already", "name another place, or add --force")
    if target.is_dir() and not _is_own(target):
        raise UserError(out, "is a directory with other files than an export", "name a new one")
    if not target.absolute().parent.is_dir():
        raise UserError(out, "is in a directory that does not exist", f"mkdir -p {target.absolute().parent}")
    if format in (ExportFormat.safetensors, ExportFormat.hf):
        _export_weights(run_dir, target, step, as_hugging_face=format is ExportFormat.hf, trust_code=trust_code)
        return
    if step is not None:
        raise UserError("--step", "chooses a checkpoint", "use it with --format safetensors or hf")
    _export_metrics(run_dir, target, format)


def _is_own(directory: Path) -> bool:
    """Whether the directory holds nothing but an export, which may be replaced."""
    from trainer.tools.trained.export import TOKENIZER_PARTS

    written = {
        "model.safetensors",
        "config.toml",
        "README.md",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        *TOKENIZER_PARTS,
    }
    names = {path.name for path in directory.iterdir()}
    card = directory / "README.md"  # a folder of someone else's model may have the same files
    if names and names <= written:
        return card.is_file() and "by `train export`" in card.read_text(encoding="utf-8", errors="replace")
    return all(name.startswith("events.out.tfevents.") for name in names)


def _export_weights(run_dir: str, out: Path, step: int | None, *, as_hugging_face: bool, trust_code: bool) -> None:
    from trainer.tools.trained.export import export_model

    saved = export_model(Path(run_dir), out, step=step, as_hugging_face=as_hugging_face, trust_code=trust_code)
    echo(f"wrote the weights after step {saved.step}, config and model card to {out}", err=True)


def _export_metrics(run_dir: str, out: Path, format: ExportFormat) -> None:
    from trainer.tools.runs.load import load_run
    from trainer.tools.runs.rows import write_csv, write_parquet

    writers: dict[ExportFormat, Callable[[RunRecord, Path], int]] = {
        ExportFormat.csv: write_csv,
        ExportFormat.parquet: write_parquet,
        ExportFormat.tensorboard: _write_tensorboard,
    }
    run = load_run(run_dir)
    count = writers[format](run, out)
    for note in run.notes:
        echo(f"note: {note}", err=True)
    echo(f"wrote {count:,} rows of {len(run.keys)} keys to {out}", err=True)


def _write_tensorboard(run: RunRecord, out: Path) -> int:
    from trainer.metrics.payload_contract import build_payload
    from trainer.metrics.sinks.tensorboard import TensorboardSink
    from trainer.tools.runs.rows import rows_of

    if out.exists():
        shutil.rmtree(out)
    failures: list[str] = []
    sink = TensorboardSink(out, on_event=lambda event: failures.append(str(event["error"])))
    count = 0
    for row in rows_of(run):
        sink.log(build_payload(row.mode, row.step, row.values))
        count += 1
    sink.close()
    if failures:
        fix = "run: pip install tensorboard" if "No module" in failures[0] else "check the path and the free space"
        raise UserError("--format tensorboard", f"could not be written: {failures[0]}", fix)
    return count
