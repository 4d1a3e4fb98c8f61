"""The profile of a run: `RUN_DIR/profile` with the trace and its summary, written by the run and read by the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from trainer.extensions.profile.trace import TraceSummary
from trainer.files import read_json, write_json

FOLDER: Final = "profile"
TRACE: Final = "trace.json.gz"
SUMMARY: Final = "summary.json"
MOST_KERNELS: Final = 25


def write_summary(folder: Path, found: TraceSummary, *, first_step: int) -> None:
    """Write the summary beside the trace.

    Args:
        first_step: global step of the first profiled one.
    """
    content = asdict(found)
    content["kernels"] = content["kernels"][:MOST_KERNELS]
    content["num_kernels"] = len(found.kernels)
    content["synchronizations"] = {str(step): dict(calls) for step, calls in found.synchronizations.items()}
    write_json(folder / SUMMARY, {"profile_version": 1, "first_step": first_step, **content})


def read_summary(run_dir: Path) -> Mapping[str, Any] | None:
    """What `write_summary` wrote; None if the run was not profiled, or it cannot be read."""
    try:
        content = read_json(run_dir / FOLDER / SUMMARY)
    except (OSError, ValueError):
        return None
    return content if content.get("profile_version") == 1 else None
