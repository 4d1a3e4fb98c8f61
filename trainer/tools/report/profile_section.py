"""The section of a report on where the time of profiled steps went (`train --profile N`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.extensions.profile.record import FOLDER, SUMMARY, TRACE, read_summary
from trainer.tools.report.markup import Html, element, join, table
from trainer.tools.report.sections import section
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted


def profile_section(runs: Sequence[RunRecord]) -> Html:
    """A table of kernels for each run that was profiled; nothing if none was."""
    found = [(run, read_summary(run.path)) for run in runs if run.path.is_dir()]
    parts = [_readable(run, summary, is_single=len(runs) == 1) for run, summary in found if summary is not None]
    return section("Where the time went", *parts) if parts else Html("")


def _readable(run: RunRecord, summary: Mapping[str, Any], *, is_single: bool) -> Html:
    """The run's part, or a note that its summary cannot be one."""
    try:
        return _profile(run, summary, is_single=is_single)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return element("p", f"{run.name}: {FOLDER}/{SUMMARY} is damaged.", class_="note")


def _profile(run: RunRecord, summary: Mapping[str, Any], *, is_single: bool) -> Html:
    what, num_steps, first = _kind(summary), int(summary["num_steps"]), int(summary["first_step"])
    steps = f"Step {first:,}" if num_steps == 1 else f"Steps {first:,} to {first + num_steps - 1:,}"
    waits = sum(sum(calls.values()) for calls in summary["synchronizations"].values())
    line = (
        f"{steps} of rank 0: {summary['step_ms']:.1f} ms a step; no {what} runs in "
        f"{summary['idle_ms'] / summary['step_ms']:.0%} of it (longest gap {summary['longest_gap_ms']:.1f} ms); "
    )
    line += f"{counted(waits, 'call')} waited for the device. " if summary["is_of_device"] else ""
    line += f"The profiler itself makes the host slower. Open {FOLDER}/{TRACE} in Perfetto or chrome://tracing."
    rows = [
        [
            element("code", str(kernel["name"])),
            f"{kernel['calls'] / num_steps:,.1f}",
            f"{kernel['total_ms'] / num_steps:,.3f}",
            f"{kernel['share']:.1%}",
        ]
        for kernel in summary["kernels"]
    ]
    more = int(summary["num_kernels"]) - len(rows)
    note = element("p", f"and {more:,} more, which take less.", class_="note") if more > 0 else ""
    head = (what.capitalize(), "Calls per step", "ms per step", "Share of all")
    heading = "" if is_single else element("h3", run.name)
    return join([heading, element("p", line), table(head, rows, caption=f"Time by {what} of {run.name}"), note])


def _kind(summary: Mapping[str, Any]) -> str:
    return "kernel" if summary["is_of_device"] else "operator"
