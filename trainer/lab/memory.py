"""Memory of a rank, predicted by running its steps without numbers: what tensors exist together at
the worst moment. A run that is out of memory says what took it, and what would take less.

The steps are the run's own, on tensors that have a size and no content (`FakeTensorMode`). A
dispatch mode sees each tensor come into being, and a weak reference sees it go. So recomputation,
the loss in chunks, mixed precision and models of the user's own need no formula. Nor do shards:
FSDP2 itself runs, as the first of as many ranks as are assumed, in a process group that sends
nothing (torch's backend "fake"). Only DDP's buckets, which its C++ code allocates unseen, are
imitated.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from trainer.config.load import apply_override
from trainer.config.schema import RunConfig
from trainer.data.batch import MicroBatch
from trainer.distributed.env import RankInfo
from trainer.distributed.shards import own_part
from trainer.distributed.strategy import Replicated, Strategy, compile_blocks
from trainer.errors import UserError
from trainer.lab.flash_linear_attention import kernel_rule, refusal_here, use_rule
from trainer.lab.gated_delta import GatedDelta
from trainer.metrics.logger import get_logger
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.model.encoder import GatedRecurrence
from trainer.model.protocol import tied_names
from trainer.model.recurrence import HAS_TRITON, fused_scan
from trainer.training.extension import Extension
from trainer.training.setup.parts import (
    autocast_context,
    in_cells,
    make_model,
    make_strategy,
    max_tokens_per_micro,
    model_and_loss,
    prepared_units,
)
from trainer.training.setup.plan import Plan, ledger_bytes, make_auxiliary, width_of
from trainer.training.setup.sources import runs_on
from trainer.training.step.optimizer import build_optimizer
from trainer.training.step.step import TrainStep

if TYPE_CHECKING:
    from trainer.training.run import Run

every_rank_logger = get_logger(__name__, rank_zero_only=False)
SNAPSHOT_ENTRIES = 100_000  # the last allocations

MOST_SECONDS = 30.0
CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist, each from the operation on that returns it.

    A storage that is resized in place counts with its new size: so FSDP2 frees and allocates whole
    parameters, without an operation that a dispatch mode would see. Of a sharded tensor, the shard
    counts that this rank holds. After `most_seconds` of this process's own work, however busy the
    machine is, an operation raises instead.
    """

    def __init__(self, most_seconds: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        # An optimizer is at work: the numbers it reads do not change the size of its state, and are
        # 1 (a flag: False).
        self.steps = False
        self._until = time.process_time() + most_seconds
        self._operations = 0
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._torch_resize: Any = None

    @property
    def is_over(self) -> bool:
        return time.process_time() > self._until

    def __enter__(self) -> LiveBytes:
        """Begin to count, and follow `UntypedStorage.resize_`."""
        torch_resize = self._torch_resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = torch_resize(storage, size)
            if storage._cdata in self._seen:
                self._set_size(storage._cdata, storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._torch_resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count what it returns. Raises TimeoutError: the time is over."""
        if func.namespace == "prim":  # a question about a tensor, such as its device: it makes none
            return func(*args, **(kwargs or {}))
        self._operations += 1
        # Reading this clock may take as long as an operation.
        if self._operations % 64 == 0 and self.is_over:
            raise TimeoutError("it would take long")
        # Not imported for this: who has a DTensor has imported it.
        sharded = sys.modules.get("torch.distributed.tensor")
        if sharded is not None and any(issubclass(each, sharded.DTensor) for each in types):
            return NotImplemented  # it then runs the operations on its shards, which come here
        if self.steps and func is torch.ops.aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return False
            return 1.0 if args[0].is_floating_point() else 1
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return returned

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return

        def forget(_: Any) -> None:
            del self._seen[key]
            self.now -= self._sizes.pop(key)

        self._seen[key] = weakref.ref(storage, forget)
        self._set_size(key, storage.nbytes())

    def _set_size(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors of one rank: of a sharded model, of its own shards."""

    weights: int
    optimizer: int
    ledger: int
    buckets: int  # of DDP, which hold the gradients
    gradients: int  # from the last backward of a window to its update; 0 with buckets
    peak: int  # most that exist together: the others, and activations at the worst moment of a step

    def parts(self) -> dict[str, int]:
        """All but the peak, without what there is none of."""
        return {name: size for name, size in vars(self).items() if size and name != "peak"}


def resident_bytes() -> int:
    """Memory of this process that is in use; 0 where it is not known."""
    file = Path("/proc/self/status")
    if not file.exists():  # not Linux
        return 0
    return int(file.read_text(encoding="utf-8").partition("VmRSS:")[2].split()[0]) * 1024


def predict_memory(plan: Plan, *, most_seconds: float = MOST_SECONDS) -> Memory:
    """Memory of a rank's tensors from the second step on, without evaluations and saving.

    Raises TimeoutError: it takes long; any Exception: the user's model or optimizer cannot run
    without numbers, or needs inputs of its own.
    """
    live = LiveBytes(most_seconds)
    try:
        with _assumed_ranks(plan) as strategy, warnings.catch_warnings():
            return _predict(plan, live, strategy)
    except Exception:
        if live.is_over:  # whatever the error was made into on its way through the user's code
            raise TimeoutError("it would take long") from None
        raise


def _predict(plan: Plan, live: LiveBytes, strategy: Strategy) -> Memory:
    config = plan.config
    is_sharded = plan.layout is not None
    model = _sharded_on_meta(plan, strategy) if is_sharded else None
    warnings.simplefilter("ignore")  # a run gives them
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True), live:
        if model is None:
            model = make_model(plan)
        else:
            _make_empty(model)
        wanted = config.train.device
        if HAS_TRITON and (wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())):
            use_kernels(model, config.train.precision)
        sizes = [live.now]
        has_buckets = isinstance(strategy, Replicated)
        if has_buckets:
            average_into_buckets(model)
        sizes.append(live.now)
        step = _make_step(plan, model, strategy)
        if config.train.compile and not is_sharded:
            compile_blocks(model, backend="aot_eager_decomp_partition")
            # A first call, since nothing is compiled under a dispatch mode: the compiler chooses
            # what the backward keeps.
            with _pop_mode_temporarily(), step.autocast():
                step.model(**_micro_batch(plan, model).inputs, state=None)
        _fill_gradients(model)
        live.steps = True
        step.launch(lr=config.optimizer.lr, stop=False, saved=False)  # makes the optimizer's state
        live.steps = False
        sizes.append(live.now)
        window = [_micro_batch(plan, model)]
        # The last of them is the worst: the gradients of the others are there.
        if config.micro_batches.most * plan.facts.shards_per_rank > 1:
            if not is_sharded:
                _fill_gradients(model)
            else:
                window *= 2  # FSDP2 has its own place for them
        live.peak = live.now
        step.accumulate(1, window)
        gradients = 0
        if not has_buckets:
            gradients = _gradient_bytes(model)
        live.steps = True
        step.launch(lr=config.optimizer.lr, stop=False, saved=False)
    # Each is what came into being between two of the sizes.
    weights, buckets, optimizer = (after - before for before, after in itertools.pairwise([0, *sizes]))
    slab = plan.facts.shards_per_rank * ledger_bytes(config.ledger, width_of(model))
    return Memory(weights, optimizer, slab, buckets, gradients, live.peak + slab)


def use_kernels(model: nn.Module, precision: str) -> None:
    """Let the model compute as on CUDA: fake tensors on a CPU then need as much memory."""
    for module in model.modules():
        if isinstance(module, GatedRecurrence):
            module.scan = fused_scan
    if isinstance(model, GatedDelta) and precision != "fp32" and not refusal_here(0, model.dim // model.heads):
        use_rule(model, kernel_rule)


def _sharded_on_meta(plan: Plan, strategy: Strategy) -> nn.Module:
    """The model in shards, on the meta device: FSDP2 makes a view of each rank's part, of which
    many fake ones take long. Raises UserError: the model looks at its numbers while it is built."""
    # What a compiler leaves out is not known.
    train = plan.config.train.model_copy(update={"compile": False})
    config = plan.config.model_copy(update={"train": train})
    with torch.device("meta"):
        model = make_model(plan)
    strategy.shard(model, partial(prepared_units, model, config))
    return model


def _make_empty(model: nn.Module) -> None:
    """Move a model from the meta device, with tied parameters, which `to_empty` cuts."""
    tied = tied_names(model)
    model.to_empty(device=CPU)
    for name, owner in tied.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, model.get_parameter(owner))


@contextmanager
def _assumed_ranks(plan: Plan) -> Iterator[Strategy]:
    """The strategy of a run on as many ranks as the plan assumes, of which this process is the
    first and no other exists. Raises UserError: replicas do not fit the ranks; ValueError: this
    process has a process group."""
    info = RankInfo(world_size=plan.facts.world_size)
    if plan.layout is None:
        yield make_strategy(plan.config, info, CPU)
        return
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    dist.init_process_group("fake", rank=0, world_size=info.world_size, store=dist.HashStore())
    try:
        yield make_strategy(plan.config, info, CPU)
    finally:
        dist.destroy_process_group()


def average_into_buckets(model: nn.Module) -> None:
    """Do to memory what DDP does in a window's last backward: gradients view its buckets."""
    buckets = {each: torch.empty_like(each) for each in model.parameters() if each.requires_grad}

    def accumulated(parameter: Tensor) -> None:
        parameter.grad = buckets[parameter]  # type: ignore[index]

    for parameter in buckets:
        parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]


def _fill_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _gradient_bytes(model: nn.Module) -> int:
    return sum(tensor_bytes(parameter.grad) for parameter in model.parameters())


def _make_step(plan: Plan, model: nn.Module, strategy: Strategy) -> TrainStep:
    config = plan.config
    cell_model, loss = model_and_loss(model, plan, None, vocab_size=plan.vocab_size)
    if isinstance(strategy, Replicated):  # DDP needs ranks
        strategy = Strategy()
    return TrainStep(
        model=strategy.wrap(in_cells(cell_model, plan), model),
        ledgers=(),  # its states are counted by their number; without one a model makes zeros
        objective=loss,
        auxiliary=make_auxiliary(config.objective, model, plan.parts),
        optimizer=build_optimizer(model, config.optimizer, plan.parts),
        gns=GradientNoiseScale(model) if config.gns.enabled else None,
        scaler=torch.amp.GradScaler("cpu", enabled=False),  # one that is on reads numbers
        max_tokens_per_micro=max_tokens_per_micro(plan),
        clip_grad_norm=config.train.clip_grad_norm,
        world_size=1,
        device=CPU,
        autocast=autocast_context(config, CPU),
        strategy=strategy,
    )


def _micro_batch(plan: Plan, model: nn.Module) -> MicroBatch:
    """The largest micro-batch of the run's sources."""
    length = plan.config.row_tokens
    rows = max_tokens_per_micro(plan) // length
    inputs = {"tokens": torch.zeros(rows, length, dtype=torch.int64)}
    if runs_on(plan, model):
        inputs["resets"] = torch.zeros(rows, length, dtype=torch.bool)
    return MicroBatch(inputs, torch.zeros_like(inputs["tokens"]), None, {})


class MemorySnapshot(Extension):
    """`train.memory_snapshot`: records CUDA's allocations, and writes them at the end."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        if run.device.type != "cuda":
            problem = f"records CUDA's memory, not that of {run.device.type}"
            raise UserError("train.memory_snapshot", problem, "remove it")
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        for left in run.run_dir.path.glob("memory_rank_*.pickle"):
            left.unlink(missing_ok=True)

    def closed(self) -> None:
        write_snapshot(self.run)
        torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(run: Run) -> None:
    """Write this rank's snapshot, unless it is there: it shows most where the memory ran out."""
    file = run.run_dir.path / f"memory_rank_{run.info.rank}.pickle"
    if not file.exists():
        torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]


def explain(run: Run) -> None:
    """Log what took the memory, predicted and measured, and which settings take less."""
    if run.config.train.memory_snapshot:
        write_snapshot(run)
    measured = {"weights": sum(map(tensor_bytes, run.model.parameters()))}
    measured["optimizer"] = sum(map(tensor_bytes, tree_leaves([*run.state.optimizer.state.values()])))
    measured["gradients"] = _gradient_bytes(run.model)
    states = ledger_bytes(run.config.ledger, width_of(run.model))
    measured["ledger"] = len(run.state.ledgers) * states
    where = "the CPU's peak is not measured"
    if run.device.type == "cuda":
        measured["peak"] = torch.cuda.max_memory_allocated(run.device)
        where = _occupancy(run.device)
    changed = {change: _predicted(plan_with(run.plan, change)) for change in savings(run.plan)}
    lines = "\n".join(memory_lines(_predicted(run.plan), measured, changed))
    text = "out of memory at step %d, rank %d (%s):\n%s"
    every_rank_logger.error(text, run.position.step + 1, run.info.rank, where, lines)


def _occupancy(device: torch.device) -> str:
    """Who else holds memory of a device, and how much lies unused."""
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    unused = reserved - torch.cuda.memory_allocated(device)
    others = f"of {_mb(total)}, other processes hold {_mb(total - free - reserved)}"
    text = f"{others}, {_mb(unused)} lie between tensors"
    if unused > total / 10:
        text += ": PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment leaves less"
    return text


def memory_lines(
    predicted: Memory | None, measured: dict[str, int], changed: Mapping[tuple[str, ...], Memory | None]
) -> Iterator[str]:
    """A table of the parts, and what takes less; `changed`: memory with other settings."""
    foreseen: dict[str, int] = {}
    if predicted is not None:
        foreseen = dict(vars(predicted))
        foreseen["gradients"] += foreseen.pop("buckets")
    for parts in (foreseen, measured):
        if "peak" in parts:
            parts["activations and others"] = 2 * parts["peak"] - sum(parts.values())
    yield f"  {'':24}   predicted     measured"
    for name in ("weights", "optimizer", "gradients", "ledger", "activations and others", "peak"):
        cells = [_mb(parts.get(name)) for parts in (foreseen, measured)]
        yield f"  {name:24}" + " ".join(f"{cell:>12}" for cell in cells)
    if predicted is None:
        yield from (f"  {' and '.join(change)} may help" for change in changed)
        return
    known = [(memory.peak, change) for change, memory in changed.items() if memory is not None]
    for peak, change in sorted(known):
        if peak < predicted.peak:
            yield f"  a peak of {_mb(peak)} is predicted with {' and '.join(change)}"


def savings(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Settings that may take less memory, of which some belong together."""
    config, has_ranks = plan.config, plan.facts.world_size > 1
    rows = config.data.mixing.batch_size
    if rows > 1 and config.micro_batches.is_constant:
        micro_batches = 2 * config.micro_batches.first
        yield f"data.mixing.batch_size={rows // 2}", f"train.micro_batches={micro_batches}"
    settings = {
        'train.activation_checkpointing="block"': config.train.activation_checkpointing == "off",
        "objective.chunk_tokens=1024": not config.objective.chunk_tokens,
        'train.precision="bf16"': config.train.precision == "fp32",
        'ledger.dtype="bfloat16"': config.ledger.dtype != "bfloat16",
        'distributed.strategy="fsdp"': has_ranks and config.distributed.strategy == "ddp",
    }
    yield from ((setting,) for setting, saves in settings.items() if saves)


def plan_with(plan: Plan, change: Iterable[str]) -> Plan | None:
    """The plan with settings `KEY=VALUE`; None if they do not go with the others."""
    raw = plan.config.model_dump(mode="json")
    for setting in change:
        apply_override(raw, setting)
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError:
        return None
    rows, before = config.data.mixing.batch_size, plan.config.data.mixing.batch_size
    facts = replace(plan.facts, tokens_per_micro=plan.facts.tokens_per_micro * rows // before)
    return replace(plan, config=config, facts=facts)


def _predicted(plan: Plan | None) -> Memory | None:
    if plan is None:
        return None
    try:
        return predict_memory(plan, most_seconds=MOST_SECONDS / 3)
    except Exception:  # noqa: BLE001 - see `predict_memory`
        return None


def tensor_bytes(value: Any) -> int:
    """Bytes of what this rank holds of a tensor; 0 of anything else."""
    return own_part(value).nbytes if isinstance(value, Tensor) else 0


def _mb(size: float | None) -> str:
    return "not known" if size is None else f"{size / 1e6:,.1f} MB"
