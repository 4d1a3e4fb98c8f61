"""What the branches of a checkpoint gave, in `RUN_DIR/cbs/STEP`: kept, and never mixed with results of other settings.

study.json                  what all branches here have in common
batch_2-lr_0.001-seed_0/    one branch: a run directory, and its result.json once it is done
cbs.json, cbs.svg           the answer of the latest call
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import write_json
from trainer.tools.branching.study import Branch, Study
from trainer.tools.runs.load import RunRecord, load_run
from trainer.untrusted import read_json

STUDY_FILE, RESULT_FILE, ANSWER_FILE = "study.json", "result.json", "cbs.json"
LAST_PART = 4  # the last quarter of the steps counts, without held-out documents


@dataclass(frozen=True)
class BranchResult:
    """One branch that is done.

    Args:
        loss: at its end; None: the loss or the gradient ceased to be finite.
        tokens: target tokens that it trained on.
        seconds: wall time, without what was lost by interruptions.
    """

    loss: float | None
    tokens: int
    seconds: float


def read_common(directory: Path) -> dict[str, Any] | None:
    """What the branches of a directory have in common; None if it has none.

    Raises:
        UserError: the file is damaged.
    """
    has_branches = any(path.is_dir() for path in directory.glob("batch_*"))
    return _read(directory / STUDY_FILE) if has_branches else None


def refuse_mixing(study: Study) -> None:
    """Refuse a study whose results would not compare with those that its directory holds.

    Raises:
        UserError: naming what differs.
    """
    before = read_common(study.directory) or {}
    changed = [key for key in study.common if before and before.get(key) != study.common[key]]
    if changed:
        listed = ", ".join(f"{key} {before.get(key)} (now {study.common[key]})" for key in changed)
        fix = "give the same options, or move the directory away"
        raise UserError(str(study.directory), f"holds branches with {listed}; their losses do not compare", fix)


def claim(study: Study) -> None:
    """Make the directory one of this study, before its first branch."""
    study.directory.mkdir(parents=True, exist_ok=True)
    write_json(study.directory / STUDY_FILE, study.common)


def read_result(study: Study, branch: Branch) -> BranchResult | None:
    """The result of a branch; None if it is not done.

    Raises:
        UserError: the file is damaged, or of a branch that differs.
    """
    path = study.directory / branch.name / RESULT_FILE
    found = _read(path)
    if found is None:
        return None
    if found.get("branch") != branch.to_json():
        raise UserError(str(path), "is of another branch than its directory says", "remove the directory")
    return BranchResult(found["loss"], found["tokens"], found["seconds"])


def write_result(study: Study, branch: Branch, result: BranchResult) -> None:
    """Keep the result of a branch."""
    write_json(study.directory / branch.name / RESULT_FILE, {"branch": branch.to_json(), **asdict(result)})


def held_out_loss(run_dir: Path, step: int) -> float | None:
    """The held-out loss at `step`; None if it was not evaluated."""
    steps, values = load_run(run_dir).evals.column("eval_loss")
    return dict(zip(steps, values, strict=True)).get(step)


def last_training_loss(run: RunRecord, *, last: int, num_steps: int) -> float | None:
    """Mean training loss per token over the last quarter of `num_steps` steps; None if a step is missing."""
    first = last - num_steps // LAST_PART + 1
    losses, tokens = (dict(zip(*run.train.column(key), strict=True)) for key in ("loss", "tokens_in_step"))
    steps = range(first, last + 1)
    if any(step not in losses for step in steps):
        return None
    return sum(losses[step] * tokens[step] for step in steps) / sum(tokens[step] for step in steps)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read: {error}", "remove it") from None
