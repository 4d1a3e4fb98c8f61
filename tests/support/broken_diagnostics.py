"""Finds every function of a run that only measures or shows, and trains with one of them broken at a time.

A function counts as a diagnostic by where it is defined, so that a new one is found without being listed: everything in
`trainer.metrics` but `NOT_DIAGNOSTIC`, the modules of `SHOWN`, and the draining methods of every class that reports metrics,
wherever it is.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import trainer
from tests.support.forks import count_launch, fork_server
from tests.support.runs import environment, free_port, rank_environment, read_rows

NOT_DIAGNOSTIC = {
    "trainer.metrics.catalog": "tables",
    "trainer.metrics.payload_contract": "the format of the record",
    "trainer.metrics.best_effort": "the guards themselves",
    "trainer.metrics.logger": "what warns of a failure",
    "trainer.metrics.tracker": "holds the guards, and writes the record",
    "trainer.metrics.run_status": "the state of a run",
    "trainer.metrics.aggregate.Recorder": "the road of every metric, which guards each value",
    "trainer.metrics.sinks.JsonlSink": "the record",
    "trainer.metrics.sinks.LineFile": "writes the record",
    "trainer.metrics.noise_scale.hooks.norms_of": "clipping needs the norm",
    "trainer.metrics.noise_scale.hooks.square_sum": "clipping needs the norm",
    "trainer.metrics.aggregate.reduce_over_ranks": "a collective",
    "trainer.metrics.aggregate._length": "size of the collective's vector; the same on all ranks",
    "trainer.metrics.aggregate.rank_operations": "which keys are reduced; the same on all ranks",
    "trainer.metrics.noise_scale.hooks.GradientNoiseScale._hook": "a guard",
    "trainer.metrics.sinks.BackgroundSink._run": "holds a guard",
    "trainer.lab.remote": "has faults of its own",
    "trainer.lab.auxiliary": "the loss",
    "trainer.lab.weights": "weights of the model",
    **dict.fromkeys(("trainer.lab.pieces", "trainer.lab.nested_state"), "models and their loss"),
    "trainer.lab.contract_check": "refuses a model",
    "trainer.lab.contracts": "is what refuses it",
    **dict.fromkeys(("trainer.lab.gated_delta", "trainer.lab.transformer"), "models"),
    "trainer.lab.optimizers": "optimizers",
    "trainer.lab.own_batches.OwnTask.run": "a collective, and holds a guard",
    **dict.fromkeys(
        (f"trainer.lab.depth.Depth.{name}" for name in ("begin", "micro_done", "part", "metrics")),
        "run the model on all ranks, and hold a guard",
    ),
}
SHOWN = (
    "trainer.lab",
    "trainer.objective.loss.token_type_sums",
    "trainer.tools.summary.summarize",
    "trainer.training.run_dir.RunDir.keep_status",
    "trainer.training.step.core_extensions",
    "trainer.training.step.core_extensions",
    "trainer.data.pool.ActivePool.snapshot",
)
DRAINS = ("drain_metrics", "drain_step_metrics")
# What a checkpoint holds is no diagnostic: a state that cannot be saved or restored must not pass for one.
STATES = ("state_dict", "load_state_dict", "load")
TIMEOUT_SEC = 1500


@dataclass(frozen=True)
class Target:
    """A function, and where it is bound."""

    name: str
    holder: Any
    attribute: str


def find_diagnostics() -> dict[str, Target]:
    """All of them, by name."""
    found: dict[str, Target] = {}
    for module in _modules():
        for target in _functions(module):
            is_shown = _is_below(target.name, ("trainer.metrics", *SHOWN))
            if target.attribute in DRAINS or (is_shown and not _is_below(target.name, NOT_DIAGNOSTIC)):
                found[target.name] = target
    return dict(sorted(found.items()))


def _modules() -> Iterator[types.ModuleType]:
    for info in pkgutil.walk_packages(trainer.__path__, "trainer."):
        if not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


def _is_below(name: str, places: Sequence[str] | Mapping[str, str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _functions(module: types.ModuleType) -> Iterator[Target]:
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            yield Target(f"{module.__name__}.{name}", module, name)
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            if getattr(value, "_is_protocol", False):
                continue
            for attribute, member in vars(value).items():
                is_ours = attribute == "__call__" or not attribute.startswith("__")
                is_function = isinstance(member, types.FunctionType | staticmethod | classmethod | property)
                if is_ours and is_function and attribute not in STATES:
                    yield Target(f"{module.__name__}.{name}.{attribute}", value, attribute)


@contextmanager
def replaced(target: Target, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """The function, wrapped, wherever it is bound."""
    member = vars(target.holder)[target.attribute]
    if isinstance(member, staticmethod | classmethod):
        new: Any = type(member)(wrap(member.__func__))
    elif isinstance(member, property):
        new = property(wrap(member.fget))  # type: ignore[arg-type]
    else:
        new = wrap(member)
    holders = [target.holder]
    if inspect.ismodule(target.holder):
        ours = [module for name, module in sys.modules.items() if name.startswith("trainer.")]
        holders = [module for module in ours if vars(module).get(target.attribute) is member]
    for holder in holders:
        setattr(holder, target.attribute, new)
    try:
        yield
    finally:
        for holder in holders:
            setattr(holder, target.attribute, member)


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Begun:
    """Whether the run that is going on has begun its first step: before that, everything may refuse to start."""

    def __init__(self) -> None:
        self.is_set = False

    def mark(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what a step begins with."""

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            self.is_set = True
            return function(*args, **options)

        return call


def failing(begun: Begun) -> Wrap:
    """Raises in a run that has begun."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if begun.is_set:
                raise ArithmeticError("broken on purpose")
            return function(*args, **options)

        return call

    return wrap


@dataclass(frozen=True)
class Outcome:
    """A run on one rank with a function broken."""

    code: int | str
    """What `train` returned, or what it raised."""
    said: str
    """stderr."""


def train_with_broken(
    directory: Path, config: Path, cases: Mapping[str, Sequence[str]], *, world_size: int, breaks_on: Sequence[int]
) -> dict[str, list[Outcome]]:
    """Name of a case ("" for a run with nothing broken) -> outcomes by rank. Its run directory is `directory / run <name>`.

    `cases`: name -> the functions that are broken at once, on the ranks `breaks_on`."""
    # One a run: a rank that is ahead would meet the store of the run before.
    ports = [free_port() for _ in range(1 + len(cases))]
    context = fork_server()
    count_launch()
    processes = []
    for rank in range(world_size):
        environ = environment(rank_environment(rank, world_size, ports[0]) if world_size > 1 else {})
        args = (rank, directory, config, environ, dict(cases), rank in breaks_on, ports[1:])
        processes.append(context.Process(target=_train_all, args=args, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(TIMEOUT_SEC)
        if process.is_alive():
            for each in processes:
                each.kill()
            raise AssertionError(f"a rank hangs; the last run is {max(directory.glob('*.0'), key=os.path.getmtime)}")
    by_rank = [json.loads((directory / f"outcomes_{rank}.json").read_text()) for rank in range(world_size)]
    return {name: [Outcome(*told[name]) for told in by_rank] for name in by_rank[0]}


def _train_all(
    rank: int,
    directory: Path,
    config: Path,
    environ: Mapping[str, str],
    cases: Mapping[str, Sequence[str]],
    breaks: bool,
    ports: Sequence[int],
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    targets = _all_targets(sorted({name for case in cases.values() for name in case}))
    begun = Begun()
    outcomes = {"": _train_once(directory, config, "", rank, begun)}
    for (case, broken), port in zip(cases.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with _nested([(targets[name], failing(begun)) for name in broken if breaks]):
            outcomes[case] = _train_once(directory, config, case, rank, begun)
    (directory / f"outcomes_{rank}.json").write_text(json.dumps(outcomes))


def _all_targets(names: Sequence[str]) -> dict[str, Target]:
    found = {target.name: target for module in _modules() for target in _functions(module)}
    for name in set(names) - found.keys():
        holder_name, _, attribute = name.rpartition(".")
        module, _, cls = holder_name.rpartition(".")
        found[name] = Target(name, getattr(importlib.import_module(module), cls), attribute)
    return found


@contextmanager
def _nested(wrapped: Sequence[tuple[Target, Any]]) -> Iterator[None]:
    if not wrapped:
        yield
        return
    target, wrap = wrapped[0]
    with replaced(target, wrap), _nested(wrapped[1:]):
        yield


def _train_once(directory: Path, config: Path, name: str, rank: int, begun: Begun) -> tuple[int | str, str]:
    from trainer.cli.parts import PARTS
    from trainer.config.load import load_config
    from trainer.training.main import train
    from trainer.training.setup.open_run import Launch
    from trainer.training.step.step import TrainStep

    said = directory / f"{name}.{rank}"
    target = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 2)
    os.close(target)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    code: int | str
    begun.is_set = False
    try:
        loaded = load_config(str(config), [])
        with replaced(Target("", TrainStep, "accumulate"), begun.mark):
            code = train(loaded, Launch(config_path=config, run_dir=str(directory / f"run {name}"), parts=PARTS))
    except BaseException:  # noqa: BLE001 - the outcome is compared
        code = traceback.format_exc()
    sys.stderr.flush()
    return code, said.read_text(errors="replace")


def losses(directory: Path, name: str) -> dict[int, float]:
    """Step -> loss of a run's record."""
    rows = read_rows(directory / f"run {name}" / "metrics.jsonl")
    return {step: row["loss"] for (mode, step), row in rows.items() if mode == "train"}
