"""The run, and the signatures of what it is given from beyond the core (`cli.parts`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from trainer.errors import UserError

if TYPE_CHECKING:  # a run imports what it uses
    from torch import Tensor, nn
    from torch import device as Device
    from torch.optim import Optimizer

    from trainer.config.data_tables import DataTable
    from trainer.config.schema import ObjectiveTable, OptimizerTable, RunConfig
    from trainer.data.documents import Mask, ReadOptions
    from trainer.data.groups import CutOptions
    from trainer.data.layout import Stream
    from trainer.data.loader import MicroBatch
    from trainer.data.shard_source import MixOptions, ShardSource, StreamSource
    from trainer.data.tokenizer import Tokenizer
    from trainer.distributed.env import RankInfo
    from trainer.distributed.strategy import Layout, Strategy
    from trainer.ending import StopRequest
    from trainer.metrics.best_effort import BestEffort, Diagnostics
    from trainer.metrics.sinks import Sink
    from trainer.objective import Auxiliary, Loss, Objective, ObjectiveOutput
    from trainer.training.evaluator import EvalRider, EvalSet, Evaluator
    from trainer.training.extension import RunView
    from trainer.training.open_run import Run
    from trainer.training.optimizer import ParameterGroup
    from trainer.training.plan import Plan, Source
    from trainer.training.run_dir import RunDir
    from trainer.training.step import TrainStep

T = TypeVar("T")
Graphs = Callable[
    ["TrainStep", "MicroBatch", "Tensor | None", float, bool, bool], "tuple[Tensor | None, ObjectiveOutput]"
]
"""As `TrainStep.run_micro`; of the first micro-batch of a step, of the last one."""
Task = Callable[["Evaluator", int, Set[str]], dict[str, float]]
"""The numbers of an evaluation after a step, without these names."""
Found = tuple[Path, dict[str, Any]]
"""A checkpoint and its state.json."""
MISSING: Final = "the run was given no such part"


class Messages(Protocol):  # what a run says of itself
    def planned(self, plan: Plan) -> None: ...
    def begun(self, view: RunView) -> None: ...
    def out_of_memory(self, run: Run) -> None: ...
    def ended(self, run: Run, state: str, reason: str) -> None: ...


class Uploads(Protocol):  # to a store, from a step on
    def begin(self, run_dir: RunDir, step: int, diagnostics: Diagnostics, *, is_over: bool = False) -> None: ...
    def publish(self, path: Path) -> None: ...
    def wait(self, stop: StopRequest) -> None: ...


class Store(Protocol):  # of checkpoints; on rank 0
    def find_checkpoint(
        self, config: RunConfig, run_dir: RunDir, resume: str, prepare: Callable[[], None]
    ) -> tuple[Found | None, Uploads]: ...


class Evaluations(Protocol):  # more of them
    def Sample(self, units: Mapping[int, int], num_units: int, share: float, weight: float) -> Any: ...
    def draw_sample(
        self, plan: Plan, name: str, read: Mapping[ShardSource, Source], info: RankInfo, num_batches: int, runs: int
    ) -> tuple[str, list[ShardSource], Any]: ...
    def DocumentLosses(self, name: str, sample: Any) -> EvalRider: ...
    def record_losses(self, run: Run, step: int) -> None: ...


class Models(Protocol):  # what is made of a model, or for one
    def Sharded(self, layout: Layout, config: RunConfig, device: Device) -> Strategy: ...
    def Depth(self, sample: Any, guard: BestEffort) -> EvalRider: ...
    def build_optimizer(self, model: nn.Module, groups: list[ParameterGroup], table: OptimizerTable) -> Optimizer: ...
    def carry_flat(self, model: nn.Module, *, config: RunConfig | None, vocab_size: int) -> nn.Module: ...
    def check_before_run(self, plan: Plan, model: nn.Module | None, device: Device, *, step: int) -> dict[str, Any]: ...
    def in_chunks(self, plan: Plan, model: nn.Module, loss: Objective, device: Device) -> tuple[nn.Module, Loss]: ...
    def load_weights(self, model: nn.Module, path: str, tokenizer: str) -> None: ...
    def make_auxiliary(self, table: ObjectiveTable, model: nn.Module) -> Auxiliary: ...
    def make_graphs(self, plan: Plan, device: Device, strategy: Strategy, auxiliary: Auxiliary) -> Graphs | None: ...
    def recompute_blocks(self, model: nn.Module) -> None: ...


class Data(Protocol):  # of the user's own, or read in another way; and text that is tokenized once (None: stopped)
    def own_batches(self, plan: Plan, source: Source, info: RankInfo, model: nn.Module | None) -> Any: ...
    def own_set(
        self, plan: Plan, source: Source, info: RankInfo, device: Device, num_batches: int, model: nn.Module | None
    ) -> EvalSet: ...
    def OwnTask(self, plan: Plan, model: nn.Module, guard: BestEffort) -> Task: ...
    def LossMask(self, field: str) -> Mask: ...
    def StreamMixingDataset(
        self, streams: Sequence[Stream], cut: CutOptions, read: ReadOptions, mix: MixOptions, **shards: Any
    ) -> StreamSource[Any, Any]: ...
    def Series(self, data: DataTable) -> Tokenizer: ...
    def load_tokenizer(self, name: str, *, vocab_size: int, parse_special: bool, eod: int | None) -> Tokenizer: ...
    def tokenize_once(self, plan: Plan, info: RankInfo, is_stopped: Callable[[], bool]) -> Plan | None: ...


class Sinks(Protocol):  # more of them, and the run's id in wandb
    def to_services(
        self, config: RunConfig, run_dir: RunDir, found: Found | None, diagnostics: Diagnostics
    ) -> tuple[list[Sink], str | None]: ...


@dataclass(frozen=True)
class Parts:
    """What a run has beyond the core, by kind: import paths by name, and modules."""

    extensions: Mapping[str, str] = field(default_factory=dict)
    families: Mapping[str, str] = field(default_factory=dict)
    messages: Messages | None = None
    store: Store | None = None
    evaluations: Evaluations | None = None
    models: Models | None = None
    data: Data | None = None
    sinks: Sinks | None = None


NO_PARTS: Final = Parts()


def need(part: T | None, key: str) -> T:
    """A part that a key of the config asks for. A UserError if it is missing."""
    if part is None:
        raise UserError(key, MISSING, "do without this setting, or give the run its part")
    return part
