"""Checks and copies the batches of a user's data set (`data.source.target`), and makes evaluation
tasks (`eval.target`): `trainer.training.Data`.

It could go if data sets were trusted to give new objects and valid ids.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.arrays import IGNORED
from trainer.data.documents import IdBounds
from trainer.data.loader import BATCH_EXTRAS, CARRY_KEYS, OPTIONAL_CARRY_KEYS, Loader, MicroBatch, take_apart
from trainer.distributed.env import RankInfo, gather_from_ranks
from trainer.errors import UserError
from trainer.import_path import refuse_arguments, resolve_target, users_code, with_own
from trainer.lab.loss_mask import LossMask as LossMask
from trainer.lab.numbers import Series as Series
from trainer.lab.samples import forked_rng
from trainer.lab.stream_mixing import StreamMixingDataset as StreamMixingDataset
from trainer.lab.tokenized import tokenize_once as tokenize_once
from trainer.lab.tokenizer_json import load_tokenizer as load_tokenizer
from trainer.metrics.best_effort import BestEffort, as_number, checked
from trainer.on_device import to_device
from trainer.training import need
from trainer.training.evaluator import ALL, EvalSet, Evaluator
from trainer.training.plan import Plan, Source
from trainer.wording import counted

IDS = ("tokens", "targets")
ENDS = OPTIONAL_CARRY_KEYS[:2]
HOST_KEYS = {*CARRY_KEYS, *OPTIONAL_CARRY_KEYS, *BATCH_EXTRAS}
OF_ROWS = (*CARRY_KEYS, *OPTIONAL_CARRY_KEYS, "pack_num_samples")
OF_TARGETS = ("tokens", "resets", "segment_ids", "token_types")


def own_batches(
    plan: Plan, source: Source, info: RankInfo, model: nn.Module | None, kind: str = "source"
) -> OwnBatches:
    """The data set of a source on this data shard, for a model if one is given. A UserError if it
    fails, or cannot be iterated."""
    path, run, key = str(source.table.target), plan.config.run, f"{kind} {source.name}: "
    of_rank = with_own({"rank": info.rank, "world_size": info.world_size}, source.table.args, f"{key}args")
    return OwnBatches(
        make_own(path, {"seed": run.seed, "seq_len": plan.config.data.seq_len, **of_rank}, f"{key}target"),
        vocab_size=plan.vocab_size,
        key=f"{key}{path}",
        model=model,
        num_targets=IdBounds.of(path, plan.tokenizer).num_ids,
    )


def make_own(path: str, given: Mapping[str, Any], key: str) -> Any:
    """The user's data set. A UserError if it fails, or cannot be iterated."""
    target = resolve_target(path, key)
    refuse_arguments(target, path, given, key=key)
    with users_code(key):
        dataset = target(**given)
    if not hasattr(dataset, "__iter__"):
        problem = f"gave a {type(dataset).__name__}, which cannot be iterated"
        raise UserError(key, problem, "return an iterable of dicts")
    return dataset


class OwnBatches:
    """The data set itself, for what reads it ahead: batches and states are checked and copied.

    The loader prepares batches in advance, and a checkpoint needs the state after the last batch
    that was trained on. A data set that fills one buffer again and again, or whose `state_dict`
    returns the object that it counts in, would otherwise lose batches and resume too far ahead.
    Ids on the host from `vocab_size` on are refused, targets from `num_targets` on (0: likewise).
    `key` names the data set in messages; a batch's other keys are inputs of the `model`, on its
    device. A cell that does not follow the one read here is refused, until the data set resumes.
    """

    now_reading = ""  # not the data set's: another thread asks, and must not run a user's code

    def __init__(
        self,
        dataset: Any,
        *,
        vocab_size: int,
        key: str,
        model: nn.Module | None = None,
        num_targets: int = 0,
    ) -> None:
        self._dataset, self._vocab_size, self._key, self._model = dataset, vocab_size, key, model
        self._device = None if model is None else next(model.parameters()).device
        self._num_targets = num_targets or vocab_size
        self._due: dict[int, int] | None = {}  # next cells of begun groups; None: not known

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The batches, checked and copied. UserError: the data set failed, or one is wrong."""
        over = object()
        with users_code(self._key, "cannot be iterated"):
            iterator = iter(self._dataset)
        for number in count():
            with users_code(self._key, f"fails after {counted(number, 'batch')} of this start"):
                batch = next(iterator, over)
            if batch is over:
                return
            with users_code(self._key, f"has a batch that cannot be read, number {number + 1} of this start"):
                found = self._checked(batch)
            yield found

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._dataset, name)
        if name == "state_dict":
            return partial(self._state, value)
        return partial(self._resume, value) if name == "load_state_dict" else value

    def _state(self, give: Callable[[], Any]) -> Any:
        with users_code(self._key, "has a state_dict() that fails"):
            return copy.deepcopy(give())

    def _resume(self, load: Callable[[Any], None], state: Any) -> None:
        self._due = None
        load(state)

    def _checked(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            batch = {key: self._copied(key, value) for key, value in batch.items()}
        problems = _problems(batch, self._vocab_size, self._num_targets)
        for problem, fix in chain(problems, self._strays(batch)):  # the first is enough
            raise UserError(self._key, f"a batch {problem}", fix)
        if self._model is not None:
            names = (key for key in ("state", *batch) if key not in {*HOST_KEYS, "targets"})
            fix = "change the batches, or the model"
            refuse_arguments(self._model.forward, "the model", dict.fromkeys(names), key=self._key, fix=fix)
        return batch

    def _copied(self, key: str, values: Any) -> Any:
        """A copy. Numbers for the model become a tensor, on the device but for ids, which are read
        here: integers int64, floats the default type. All else stays as it is."""
        if key not in HOST_KEYS and not isinstance(values, Tensor):
            with suppress(ValueError, TypeError, RuntimeError):  # of unequal lengths, on a device
                array = np.asarray(values)
                if array.ndim and array.dtype.kind in "biuf":
                    wide = {"i": np.int64, "u": np.int64, "f": np.float64}.get(array.dtype.kind, np.bool_)
                    values = torch.from_numpy(array.astype(wide, order="C"))  # of any byte order
        if key in HOST_KEYS or not isinstance(values, Tensor):
            return copy.deepcopy(values)
        dtype = torch.get_default_dtype() if values.is_floating_point() else torch.long
        if values.is_complex() or values.dtype == torch.bool:
            dtype = values.dtype
        found = values.to(dtype, copy=True)
        return found if self._device is None or key in (*IDS, "resets") else to_device(found, self._device)

    def first(self) -> dict[str, Any]:
        """The first batch. Raises UserError: there is none."""
        for batch in self:
            return batch
        raise UserError(self._key, "gives no batch", "let it give one at least, on each rank")

    def _strays(self, batch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Groups that continue here at another cell than the one behind their last."""
        ids, cells, is_last, end_ids, end_cells = map(_on_host, map(batch.get, (*CARRY_KEYS, *ENDS)))
        if self._due is None or ids is None or cells is None or is_last is None:
            return
        for group, cell in zip(ids.tolist(), cells.tolist(), strict=True):
            due = self._due.pop(group, 0)
            if group >= 0 and cell not in (0, due):
                problem = f"continues group {group} at cell {cell}; next here is cell {due}"
                yield problem, "keep all cells of a group on one rank (or data shard), from 0 on"
        if end_ids is None or end_cells is None:
            end_ids, end_cells = np.where(is_last, -1, ids), cells
        self._due.update(zip(end_ids.tolist(), (end_cells + 1).tolist(), strict=True))


def _problems(batch: Any, vocab_size: int, num_targets: int) -> Iterator[tuple[str, str]]:
    """The problems of a batch, each with its fix. Reads from no device."""
    if not isinstance(batch, Mapping):
        yield f"is a {type(batch).__name__}, not a dict", "yield dicts with targets and the inputs of the model"
    if "targets" not in batch or "state" in batch:
        keys = ", ".join(sorted(map(str, batch))) or "nothing"
        yield f"has no targets, or a state; it has {keys}", "give targets, [B, T]; the state is the trainer's to give"
    targets, shape = batch["targets"], np.shape(batch["targets"])
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.long, torch.get_default_dtype()):
        yield "has targets that are no integers or floats", "give an array, a tensor or lists"
    if 0 in shape or not (len(shape) == 2 or (len(shape) > 2 and targets.is_floating_point())):
        yield f"has targets {list(shape)}", "give ids [B, T], or floats [B, T, ...], of at least one row"
    yield from _wrong_shapes(batch, shape)
    for key, num_ids in zip(IDS, (vocab_size, num_targets), strict=True):
        array = _on_host(batch.get(key))
        if array is not None and array.dtype.kind == "i":
            is_judged = (key == "tokens") | (array != IGNORED)
            wrong = array[((array < 0) & is_judged) | (array >= num_ids)]
            if wrong.size:
                problem = f"has the {key[:-1]} id {wrong[0]}, and the vocabulary has 0 to {num_ids - 1}"
                fix = f"mark targets that are not to be predicted with {IGNORED}, or " * (key == "targets")
                yield problem, f'{fix}set data.tokenizer = "ids", and data.vocab_size to the number of ids'
    segments = _on_host(batch.get("segment_ids"))
    if segments is not None and not -1 <= segments.min() <= segments.max() < segments.size:
        yield f"has segment_ids up to {segments.max()}", "number its segments from 0 on; -1: none"
    if len(batch.keys() & ENDS) == 1:
        yield f"has only one of {' and '.join(ENDS)}", "give both, or none"
    yield from _wrong_groups(batch)


def _wrong_shapes(batch: Mapping[str, Any], shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    for key, wanted in (dict.fromkeys(OF_ROWS, shape[:1]) | dict.fromkeys(OF_TARGETS, shape[:2])).items():
        array, given = _on_host(batch.get(key)), np.shape(batch.get(key, 0))
        kinds = {"is_last": "biu", "resets": "b"}.get(key, "iu")
        if key == "tokens" and len(given) > 2:  # features
            kinds, wanted = "iuf", shape[:1] + given[1:]
        if key in batch and not (given == wanted and (array is None or array.dtype.kind in kinds)):
            found = getattr(array, "dtype", type(batch[key]).__name__)
            yield f"has {key} {list(given)} of {found}", f"give integers {list(wanted)}; is_last, resets: booleans"


def _wrong_groups(batch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("group_ids", "end_ids"):
        if (ids := _on_host(batch.get(key))) is not None:
            for outside in ids[(ids < -1) | (ids > np.iinfo(np.int64).max)]:
                yield f"has {outside} in {key}", "use integers from 0 to 2^63 - 1; -1: a row without state"
            known, counts = np.unique(ids[ids >= 0], return_counts=True)
            for twice in known[counts > 1]:
                yield f"has the group {twice} twice", "its cells follow each other: put them into different batches"


def _on_host(values: Any) -> np.ndarray | None:
    """The values as an array; None if absent, or on a device, which must not be waited for."""
    if values is None or (isinstance(values, Tensor) and values.device.type != "cpu"):
        return None
    return np.asarray(values)


def own_set(
    plan: Plan, source: Source, info: RankInfo, device: torch.device, num_batches: int, model: nn.Module | None
) -> EvalSet:
    """A validation set of the user's own, made anew for each evaluation, and read to its end or up
    to `num_batches`. A UserError if this rank has none, or its first is not for the `model`."""
    made = partial(own_batches, plan, source, info, model, "eval source")

    def batches(accepted: frozenset[str] | None) -> Iterator[MicroBatch]:
        return islice(Loader(made(), device=device, accepted=accepted, prefetch=0), num_batches)

    first = take_apart(made().first(), None).to(device)
    read = "all batches" if num_batches == ALL else f"at most {counted(num_batches, 'batch')} per rank"
    objective, part = plan.config.objective, need(plan.parts.evaluations, "eval.source")
    weight = objective.token_ce if "token_ce" in objective.components else 1.0
    losses = part.DocumentLosses(source.name, part.Sample({}, 0, 0.0, weight))  # all are draws
    return EvalSet(source.name, batches, first.masked(), read, riders=[losses])


class OwnTask:
    """Calls the user's function on every rank; rank 0's result is logged.

    It is called with `model`, `tokenizer`, `step`, `device`, `rank` and `world_size`, and with
    `args`, and returns a mapping of names to numbers; other ranks may return anything. If it fails
    on any rank, it is switched off on all, with one warning; the run continues.
    """

    def __init__(self, plan: Plan, model: nn.Module, guard: BestEffort) -> None:
        table = plan.config.eval
        self._function = partial(resolve_target(table.target or "", "eval.target"), **table.args)
        self._given = {"model": model, "tokenizer": plan.tokenizer}
        self.guard, self._is_off = guard, False  # off: the same on all ranks

    def __call__(self, evaluator: Evaluator, step: int, taken: Set[str]) -> dict[str, float]:
        """The task's numbers as `eval/<name>`, the same on every rank, without `taken` ones; empty
        once it has failed.

        The model is in evaluation mode, without gradients; torch's random state is kept.
        """
        if self._is_off:
            return {}
        with forked_rng(evaluator.device):
            found = self.guard.run(self._call, evaluator, step, taken)
        by_rank = gather_from_ranks((found, self.guard.enabled), world_size=evaluator.info.world_size)
        failed = [rank for rank, (_, works) in enumerate(by_rank) if not works]
        self._is_off = bool(failed)
        if failed and evaluator.info.is_main:  # who writes the record
            self.guard.fail(RuntimeError(f"it failed on rank {failed[0]}; see its log"))
        return {} if self._is_off else by_rank[0][0] or {}

    def _call(self, evaluator: Evaluator, step: int, taken: Set[str]) -> dict[str, float]:
        info = evaluator.info
        with torch.no_grad(), evaluator.autocast():
            where = {"device": evaluator.device, "rank": info.rank, "world_size": info.world_size}
            found = self._function(**{**self._given, **where, "step": step})
        if not info.is_main:
            return {}
        values = checked(found, self.guard.leave_out, as_number)
        own = {f"eval/{name}": value for name, value in values.items() if value is not None}
        for key in sorted(own.keys() & taken):
            self.guard.leave_out(key, "another number of the evaluation is shown under this name; give it another one")
        return {key: value for key, value in own.items() if key not in taken}
