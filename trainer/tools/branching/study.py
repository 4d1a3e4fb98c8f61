"""A study from one checkpoint: its state in the run, the branches, and what they have in common."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from trainer.cli.parts import PARTS
from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.files import open_descriptor, read_bytes
from trainer.metrics.run_status import LOCK_NAME, take_lock, usable
from trainer.tools.runs.load import RunRecord, load_run
from trainer.tools.trained.saved_model import config_of, refuse_code
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.tensor_files import CheckpointError, read_rank
from trainer.training.run_dir import RunDir
from trainer.training.setup.plan import make_plan
from trainer.training.step.optimizer import make_schedule

DEFAULT_SHARE = 0.2  # of the tokens so far
LEAST_STEPS = 16  # of the largest batch, by default
STEPS_UNIT = 4  # of a branch's steps, so that the last quarter of its tokens is whole steps
RATE_ROWS = 10  # logged rows before the checkpoint, over which the median speed is taken


@dataclass(frozen=True)
class Origin:
    """The checkpoint that branches start from, and what was in force there."""

    run: RunRecord
    path: Path
    step: int
    config: RunConfig  # the run's; its sources without includes, and with the weights in force
    micro_batches: int  # per step and rank; all other numbers are over all ranks
    num_ranks: int
    lr: float
    tokens_seen: int
    tokens_per_step: float  # of today's batch, on average so far
    sequences_per_step: float  # of the latest row
    marker: str  # digest of the checkpoint's files

    @property
    def tokens_per_sec(self) -> float | None:
        """Median speed of the last rows before the checkpoint; None if none were logged."""
        speeds = _logged(self.run, "tokens_per_sec", self.step)[-RATE_ROWS:]
        return median(speeds) if speeds else None


def _logged(run: RunRecord, key: str, step: int) -> list[float]:
    """The values that were logged by `step`."""
    return [value for at, value in zip(*run.train.column(key), strict=True) if at <= step]


@contextmanager
def reserved(run_dir: Path) -> Iterator[None]:
    """Keep the run from being resumed, and its checkpoints, while branches start from it.
    Raises UserError: the run, or other branches of it, are being trained."""
    with ExitStack() as held:
        with suppress(FileNotFoundError):  # a copy of a run: nobody trains it
            descriptor = open_descriptor(run_dir / LOCK_NAME, os.O_RDONLY)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = "is still being trained, and may delete its checkpoint meanwhile"
                fix = "wait for it, or stop it: it can be resumed afterwards"
                raise UserError(str(run_dir), problem, fix) from None
            except OSError:  # a file system without locks
                pass
        # Two studies would write the same branches, so the directory has a lock of its own.
        (run_dir / "cbs").mkdir(exist_ok=True)
        held.enter_context(take_lock(run_dir / "cbs"))
        yield


def open_origin(run_dir: Path, path: Path, *, trust_code: bool = False) -> Origin:
    """Read what is needed of the run and its checkpoint at `path`.
    `trust_code`: import the code that its config names.
    Raises UserError: a damaged checkpoint, lost data, a rate of 0, or code without trust."""
    try:
        saved = checkpoint.verify(path)
    except CheckpointError as error:
        raise UserError("--at", str(error), "choose another checkpoint") from None
    step, world_size = saved["step"], saved["world_size"]
    tokens_seen = saved["tracker"]["tokens_seen"]
    config = config_of(saved, path)
    refuse_code(config, path, trusted=trust_code)
    config_path = config_path_of(saved.get("environment", {}), run_dir)
    plan = make_plan(config, config_path, world_size, parts=PARTS)
    micro_batches = saved["micro_batches"][0] or config.micro_batches.first
    lr = make_schedule(config, plan.length)(saved.get("reached", step))
    lr *= config.micro_batches.lr_factor(micro_batches)
    # Branches keep this rate throughout: the end of a schedule would compare nothing.
    if lr <= 0:
        problem = f"the learning rate at step {step} is 0, at which no branch learns"
        raise UserError("--at", problem, "choose another step")
    batches = read_rank(path, 0)["data"]["batch_index"]
    sources, reached = [], {"step": step + 1, "batch": batches}
    for source in plan.sources:  # under its full name, with the weight that it has reached
        weight = source.weight.evaluate(reached[source.weight.unit])
        sources.append(source.table.model_copy(update={"name": source.name, "weight": weight}))
    run, data = load_run(run_dir), config.data.model_copy(update={"source": sources})
    return Origin(
        run=run,
        path=path,
        step=step,
        config=config.model_copy(update={"data": data}),
        micro_batches=micro_batches,
        num_ranks=world_size,
        lr=lr,
        tokens_seen=tokens_seen,
        # Not over steps, which may have had other numbers of micro-batches.
        tokens_per_step=tokens_seen / batches * micro_batches,
        sequences_per_step=[float(plan.facts.cells_per_step), *_logged(run, "gns/b_big", step)][-1],
        marker=hashlib.sha256(read_bytes(path / checkpoint.MARKER)).hexdigest(),
    )


def config_path_of(environment: Mapping[str, Any], run_dir: Path) -> Path:
    """The file that the run's included files are relative to."""
    command, named = usable(environment).get("command", []), RunDir(run_dir).resolved_config
    for word, following in zip(command, [*command, ""][1:], strict=True):
        if word in ("--config", "-c") or word.startswith("--config="):
            named = Path(word.partition("=")[2] or following)
    return named


def base_steps_for(tokens: float, tokens_per_step: float, factors: Iterable[Fraction]) -> int:
    """Steps of today's batch with `tokens` or more in multiples of `STEPS_UNIT` for every factor."""
    unit = math.lcm(*((STEPS_UNIT * factor).numerator for factor in factors))
    return max(math.ceil(tokens / tokens_per_step / unit), 1) * unit


@dataclass(frozen=True)
class Branch:
    """One short run, with `factor` times today's batch and a constant learning rate."""

    factor: Fraction
    micro_batches: int
    lr_scale: float
    lr: float
    # 0 reads on where the checkpoint stopped; any other number is an order of the data of its own.
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"batch_{str(self.factor).replace('/', '_of_')}-lr_{self.lr:.6g}-seed_{self.seed}"


@dataclass(frozen=True)
class Study:
    """Branches from one checkpoint."""

    directory: Path  # `RUN_DIR/cbs/STEP`
    origin: Origin
    base_steps: int  # steps of today's batch whose tokens every branch trains on
    branches: Sequence[Branch]
    impossible: Sequence[str]  # one line on each factor that no branch can have

    @property
    def is_held_out(self) -> bool:
        """Whether the held-out loss decides, not the training loss."""
        return self.origin.config.eval.holdout_fraction > 0

    @property
    def tokens(self) -> float:
        """Expected target tokens of each branch."""
        return self.base_steps * self.origin.tokens_per_step

    @property
    def num_seeds(self) -> int:
        return len({branch.seed for branch in self.branches})

    @property
    def common(self) -> dict[str, Any]:
        """Facts that all results of the directory must share, or their losses do not compare."""
        return {
            "checkpoint": self.origin.marker,
            "tokens": round(self.tokens),
            "base_steps": self.base_steps,
            "loss": "held-out" if self.is_held_out else "training",
        }


def make_study(
    origin: Origin,
    directory: Path,
    *,
    factors: Sequence[Fraction],
    lr_grid: Sequence[Fraction],
    num_seeds: int,
    tokens: int | None,
    before: Mapping[str, Any] | None,
) -> Study:
    """The branches of all factors that are possible.

    The learning rate follows the square root of the batch for optimizers that normalize their
    updates (Malladi et al. 2022, arXiv 2205.10287), and the batch itself for SGD (Goyal et al.
    2017, arXiv 1706.02677).

    Args:
        tokens: of each branch at least; None: those of the branches that are done, or else a share
            of those so far.
        before: `Study.common` of the results that the directory has already.

    Raises:
        UserError: fewer than two factors are possible; orders of the data are asked for that cannot
            be made; or the results would not compare with those of before.
    """
    own = [source.name for source in origin.config.data.source if source.target is not None]
    if own and num_seeds > 1:
        problem = f"source {own[0]} is a target of your own, whose order only it knows"
        raise UserError("--seeds", problem, "use --seeds 1, without error bars")
    possible: dict[Fraction, int] = {}  # with their micro-batches per step and rank
    impossible = []
    for factor in sorted(set(factors)):
        number = factor * origin.micro_batches
        if number.denominator == 1:
            possible[factor] = number.numerator
        else:
            part = f"{number} of a micro-batch per step and rank"
            impossible.append(f"{factor} of today's batch is impossible: {part}")
    if len(possible) < 2:
        problem = "; ".join(["leaves fewer than two batches to compare", *impossible])
        raise UserError("--factors", problem, "name others, such as 1,2,4")
    least = LEAST_STEPS * float(max(possible)) * origin.tokens_per_step
    base_tokens = tokens or max(DEFAULT_SHARE * origin.tokens_seen, least)
    base_steps = base_steps_for(base_tokens, origin.tokens_per_step, possible)
    kept = (before or {}).get("base_steps")
    # More factors or seeds in a later call: the branches that are done must stay comparable.
    if tokens is None and kept and base_steps_for(kept, 1.0, possible) == kept:
        base_steps = kept
    exponent = 1.0 if origin.config.optimizer.name == "sgd" else 0.5
    branches = []
    for factor, micro_batches in possible.items():
        lr, steps = origin.lr * float(factor) ** exponent, (base_steps / factor).numerator
        for seed, scale in product(range(num_seeds), sorted(set(map(float, lr_grid)))):
            branches.append(Branch(factor, micro_batches, scale, lr * scale, seed, steps))
    study = Study(directory, origin, base_steps, branches, impossible)
    if before is not None:
        now = [(key, value) for key, value in study.common.items() if before.get(key) != value]
        changed = [f"{key} {before.get(key)} (now {value})" for key, value in now]
        if changed:
            problem = f"holds branches with {', '.join(changed)}; their losses do not compare"
            raise UserError(str(directory), problem, "give the same options, or move the directory away")
    return study


def parse_numbers(option: str, text: str) -> list[Fraction]:
    """`1/4,0.5,2` as exact numbers. Raises UserError: one is no positive number."""
    numbers = []
    for word in text.split(","):
        with suppress(ValueError, ZeroDivisionError):
            numbers.append(Fraction(word.strip()))
            if numbers[-1] > 0:
                continue
        raise UserError(option, f"{word!r} is no positive number", "separate numbers by commas: 1/2,1,2")
    return numbers
