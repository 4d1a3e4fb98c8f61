"""Extensions of a run: averaged weights, best checkpoint, loss spikes, numbers by layer, a profile.

The sums by layer of a step are kept for each parameter until they have been added up over ranks.
Layers are sums of those: the squares of their norms add up to that of the whole gradient. torch's
profiler records N steady steps of rank 0, as a trace in `RUN_DIR/profile`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.data.tokenizer import token_bytes
from trainer.distributed.env import from_main_rank
from trainer.distributed.strategy import Strategy, as_shard, own_part, own_range
from trainer.errors import UserError
from trainer.import_path import users_code
from trainer.lab.depth import NUM_BUCKETS
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.catalog import EMA_PREFIX, EVAL_PREFIX
from trainer.metrics.logger import get_logger
from trainer.objective import Auxiliary
from trainer.training.checkpoint import MARKER, checkpoint_name, loading
from trainer.training.evaluator import make_details
from trainer.training.extension import Extension, RunView, Step
from trainer.training.plan import Plan, width_of
from trainer.training.tensor_files import TensorFiles
from trainer.training.train_state import open_model, read_like
from trainer.wording import counted, few

logger = get_logger(__name__)
AVERAGES: Final = "ema."  # begins the names of the averages in a checkpoint


class AveragedWeights(Extension):
    """The exponential moving average of this rank's part of each trained parameter, in float32 (of
    float64 in that): a <- a + (1 - train.ema) (w - a) after each step that was not rejected.

    Buffers and frozen parameters are not averaged: with the averages go the model's own.
    """

    every_step = True

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._share = 1 - run.config.train.ema
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []  # with this rank's part of the average
        with users_code("train.ema", "there is no room for the averages", "see docs/memory.md"):
            for name, parameter in run.model.named_parameters():
                if parameter.requires_grad:
                    own = own_part(parameter.detach())
                    average = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
                    self._pairs.append((parameter, average))
                    run.state.tensors[f"{AVERAGES}{name}"] = as_shard(average, like=parameter)
        if run.found is not None:
            with loading(run.found[0], "averaged weights"):
                self._load(open_model(*run.found, rank=run.info.rank))
        if run.evaluator is not None:
            run.evaluator.weights[EMA_PREFIX] = partial(_in_place, self._pairs, run.model, run.strategy)

    def _load(self, saved: TensorFiles) -> None:
        """Continue from a checkpoint, if it has averages."""
        kept = {name: each for name, each in self.run.state.tensors.items() if name in saved.shapes}
        for name, average in kept.items():
            own_part(average).copy_(own_part(read_like(saved, name, like=average)))
        if not kept:
            logger.info("train.ema: the averages begin with the weights after step %d", self.run.first_step)

    @torch.no_grad()
    def optimizer_done(self, is_rejected: Tensor) -> None:
        """Move the averages, by nothing if the step was rejected, which the device alone knows."""
        share = torch.where(is_rejected, 0.0, self._share)
        for parameter, average in self._pairs:
            average.lerp_(own_part(parameter).to(average.dtype), share.to(average.dtype))


@contextmanager
def _in_place(pairs: Sequence[tuple[nn.Parameter, Tensor]], model: nn.Module, strategy: Strategy) -> Iterator[None]:
    """The model has the averages, and afterwards its weights again, bit for bit."""
    own, averages = [own_part(parameter.detach()) for parameter, _ in pairs], [average for _, average in pairs]
    kept = [each.clone() for each in own]

    def put(values: list[Tensor]) -> None:
        strategy.reshard(model)  # what a forward has gathered is of the values before
        torch._foreach_copy_(own, values)

    put(averages)
    try:
        yield
    finally:
        put(kept)


BEST: Final = "best"


class BestCheckpoint(Extension):
    """Finds the evaluation with the lowest `checkpoint.keep_best`, and has the run saved after it.

    The best is this state, which each checkpoint has. That of the newest counts, so that a run that
    goes back to an earlier one has the best of then, and no kill comes between a save and a record.
    """

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        refuse_unfit_best(run.plan, run.model, run.auxiliary)
        self._key = run.config.checkpoint.keep_best or ""
        self._best: dict[str, Any] = {}
        # The evaluation that a resume makes up for may be of a checkpoint in another directory.
        self._begins_here = run.found is None or run.found[0].resolve().parent == run.run_dir.checkpoints.resolve()
        self._first = run.first_step + (not self._begins_here)

    def at_boundary(self, step: int, *, is_last: bool) -> None:
        """Save after the best evaluation; end the run if the first has no such number."""
        before, (_, found) = self._best, self.run.position.last_eval or (0, {})
        if self.state_dict() != before:
            self.run.position.must_save = True
        elif found and not before and self._key not in found:
            losses_first = sorted(found, key=lambda key: not key.endswith("loss"))
            problem = f"{self._key} is no number of an evaluation; name one, such as {few(losses_first)}"
            self.run.failure = f"checkpoint.keep_best: {problem}"

    def state_dict(self) -> dict[str, Any]:
        """The best with the last evaluation, perhaps that of a resume, before the first step."""
        step, found = self.run.position.last_eval or (0, {})
        value = found.get(self._key, math.nan)
        if step >= self._first and value < self._best.get("value", math.inf):  # never NaN
            self._best = {"key": self._key, "step": step, "value": value}
        return self._best

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the best so far, if it is in this directory and has the same key."""
        there = self.run.run_dir.checkpoints / checkpoint_name(state.get("step", -1)) / MARKER
        is_there = from_main_rank(there.exists(), world_size=self.run.info.world_size)
        if self._begins_here and is_there and state["key"] == self._key:
            self._best = dict(state)
        elif state:
            text = "checkpoint.keep_best: the best so far, %s %.4f at step %d, is not kept here; another begins"
            logger.warning(text, state["key"], state["value"], state["step"])


def refuse_unfit_best(plan: Plan, model: nn.Module, auxiliary: Auxiliary) -> None:
    """Refuse a `checkpoint.keep_best` that no evaluation gives, or whose lowest is the worst."""
    key, table, components = plan.config.checkpoint.keep_best, plan.config.eval, plan.config.objective.components
    if key is None:
        return
    names, sets = ["loss"], [f"eval/{each.name}/" for each in table.source]
    if "token_ce" in components:
        names += ["perplexity"] + ["bits_per_byte"] * (token_bytes(plan.tokenizer)[0] is not None)
    found = [f"{place}{name}" for place in sets for name in names]
    if table.holdout_fraction > 0 and any(each.streams and not each.is_off for each in plan.sources):
        details = make_details(plan, Diagnostics(), auxiliary)
        found = [f"{EVAL_PREFIX}{name}" for name in (*names, *details.metric_keys)] + found
        sets.append("eval/")  # of depths
    if table.depth and width_of(model) and {"own", "token_ce"} & {*components}:
        depths, names = [1 << index >> 1 for index in range(NUM_BUCKETS)], ["loss", "loss_from_zero"]
        found += [f"{place}depth/{depth}/{name}" for place in sets for depth in depths for name in names]
    name = key.removeprefix(EMA_PREFIX if plan.config.train.ema else "")
    is_given = name in found or (table.target is not None and name.startswith("eval/"))  # known at the first evaluation
    if not table.every or not is_given or name.endswith(("accuracy", "carry_gain", "_se")):
        problem = f"{key} is no number of this run's evaluations whose lowest value is the best"
        likely = [*found, "eval_loss with eval.holdout_fraction = 0.05"][0]
        raise UserError("checkpoint.keep_best", problem, f"set eval.every, and name a loss, such as {likely}")


DECAY = 0.98  # of the averages: they span about the last 50 steps
WARMUP = 20  # losses before the first verdict: the spread of fewer is unreliable, and losses fall


class Spike(NamedTuple):
    """A loss far above the preceding ones, with their mean and standard deviation."""

    loss: float
    mean: float
    sigma: float


class LossSpikes(Extension):
    """Compares each loss with the exponential average and variance of the preceding ones.

    A loss more than `train.spike_sigma` sigma above the mean is a spike. It enters the averages
    clipped to that, so that it does not mask the next one, while a loss that stays high becomes the
    new baseline after some steps.
    """

    metric_keys = ("loss_spike",)

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._threshold = run.config.train.spike_sigma
        self._count, self._mean, self._variance = 0, 0.0, 0.0

    def settled(self, step: Step, sums: Sequence[float] | None) -> None:
        """Report the step if its loss, which is the same on all ranks, is a spike."""
        spike, outcome = None, step.outcome
        if outcome.is_taken:
            spike = self.update(outcome.loss)
        self.run.record("loss_spike", float(spike is not None))
        if spike is not None:
            text = "step %d: loss spike: %.4f, above its average of %.4f with standard deviation %.4f"
            logger.warning(text, step.number, *spike)
            event = {"event": "loss_spike", "global_step": step.number, **spike._asdict()}
            batches = [str(micro.located) for micro in step.window]  # of rank 0; the command shows all
            see = self.run.run_dir.rows_command(step.number)
            self.run.event({**event, "grad_norm": outcome.grad_norm, "batches": batches, "see": see})

    def update(self, loss: float) -> Spike | None:
        """Add a finite loss; returns the spike if it is one."""
        sigma = math.sqrt(self._variance)
        limit = self._mean + self._threshold * sigma
        spike, clipped = None, loss
        if self._count >= WARMUP and loss > limit:
            spike = Spike(loss, self._mean, sigma)
            if sigma > 0:  # 0: all losses so far are equal
                clipped = limit
        self._count += 1
        # A plain mean at first, until it would weigh the newest loss less than the decay does.
        share = max(1.0 / self._count, 1.0 - DECAY)
        distance = clipped - self._mean
        self._mean += share * distance
        self._variance = (1.0 - share) * (self._variance + share * distance * distance)
        return spike

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])
        self._mean, self._variance = float(state["mean"]), float(state["variance"])


# Entries of a tensor that are looked at. Where they are independent and normal, the relative
# standard error of a tensor's norm is `1 / sqrt(2 n)` for a sample of n: 0.6 % at 16,384. With
# kurtosis k it is `sqrt((k - 1) / (4 n))`, which is more for an embedding of which a step moves a
# few rows.
MOST_PER_TENSOR, FEWEST_PER_TENSOR = 16_384, 64
MOST_IN_ALL = 2**20  # so that neither memory nor time grows with the model


class LayerNumbers(Extension):
    """The numbers of a measured step by layer; of large tensors by a sample of their weights."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        named = {name: each for name, each in run.model.named_parameters() if each.requires_grad}
        self._parameters = list(named.values())
        self._members: dict[str, list[int]] = {}  # numbers of a layer's parameters
        for number, name in enumerate(named):
            self._members.setdefault(f"layer/{layer_of(name)}", []).append(number)
        self.metric_keys = [f"{key}/{what}" for key in self._members for what in ("grad_norm", "update_ratio")]
        self.num_sums = 3 * len(named)
        limit = min(MOST_PER_TENSOR, max(MOST_IN_ALL // len(named), FEWEST_PER_TENSOR))
        self._places = [places_of(each, limit) for each in self._parameters]
        scales = [max(each.numel() / limit, 1.0) for each in self._parameters]
        # [P] entries per entry looked at
        self._scales = torch.tensor(scales, dtype=torch.float64).to(self._parameters[0].device)
        # While a step is under way: of each parameter's gradient, and entries before the update.
        self._gradients: list[Tensor] = []
        self._before: list[Tensor] = []
        self._values: dict[str, float] = {}

    def gradient_ready(self, squares: Mapping[nn.Parameter, Tensor]) -> None:
        """Note the gradients' squared norms, and copy a sample of the weights."""
        zero = torch.zeros_like(self._scales[0])
        self._gradients = [squares.get(each, zero).to(zero.device) for each in self._parameters]
        self._before = self._entries()

    def updated(self) -> Tensor:
        """This rank's share of the squared norms of gradients, changes and weights, in turn."""
        moved = torch._foreach_sub(self._entries(), self._before)
        squares = [torch.stack(self._gradients), self._squares(moved), self._squares(self._before)]
        self._gradients, self._before = [], []
        return torch.cat(squares) / self.run.strategy.copies  # ranks that hold the same part

    def settled(self, step: Step, sums: Sequence[float] | None) -> None:
        """Compute the step's numbers; a skipped step has none."""
        self._values, length = {}, len(self._parameters)
        if sums is None or not step.outcome.is_taken:
            return
        columns = [sums[at : at + length] for at in range(0, self.num_sums, length)]
        for key, members in self._members.items():
            of_members = ([column[number] for number in members] for column in columns)
            gradient, moved, weights = map(math.fsum, of_members)
            self._values[f"{key}/grad_norm"] = math.sqrt(gradient) / step.outcome.grad_factor
            if weights > 0.0:
                self._values[f"{key}/update_ratio"] = math.sqrt(moved / weights)

    def drain_metrics(self) -> dict[str, float]:
        """The last measured step's values; they are the same on all ranks."""
        values, self._values = self._values, {}
        return values

    @torch.no_grad()
    def _entries(self) -> list[Tensor]:
        """Copies of the entries of each parameter that are looked at, [n]."""
        found = []
        for parameter, places in zip(self._parameters, self._places, strict=True):
            own = own_part(parameter)
            # Of a transposed tensor, `take` needs no copy of the whole, as flattening would.
            entries = own.reshape(-1).clone() if places is None else torch.take(own, places)
            found.append(entries.to(torch.promote_types(entries.dtype, torch.float32)))
        return found

    def _squares(self, parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square() * self._scales


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, `blocks.0` of
    `blocks.0.mixer.weight`; without a number the module that owns it, `embedding` of
    `embedding.weight`; of a parameter of the model itself its own name."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    kept = parts[:-1] or parts
    if number is not None:
        kept = parts[: number + 1]
    return ".".join(kept).replace("/", "_")  # which separates the segments of a metric key


def places_of(parameter: nn.Parameter, limit: int) -> Tensor | None:
    """[n] the entries of this rank's part that are looked at, which depend on the whole tensor's
    size alone; None: all."""
    numel = parameter.numel()  # of the whole tensor
    if numel <= limit:
        return None
    first, stop = (each * (numel // parameter.shape[0]) for each in own_range(parameter))
    drawn = torch.randint(numel, (limit,), generator=torch.Generator().manual_seed(numel)).sort().values
    return (drawn[(drawn >= first) & (drawn < stop)] - first).to(own_part(parameter).device)


FOLDER: Final = "profile"  # of the run directory
TRACE: Final = "trace.json.gz"
FIRST_PROFILED = 11
WARM_UP = 2  # steps with the profiler on that are not recorded
SETTLING = FIRST_PROFILED - 1 - WARM_UP  # steps before: models are compiled, caches are filled


class StepProfile(Extension):
    """Records steps on rank 0, in the place of an earlier profile of the run; then it is off."""

    every_step = True

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._folder, self._first_step = run.run_dir.path / FOLDER, run.first_step + FIRST_PROFILED
        self._num_steps = run.config.metrics.profile
        self._is_done = False
        self._folder.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=SETTLING, warmup=WARM_UP, active=self._num_steps, repeat=1)
        self._profiler: profile | None = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    def optimizer_done(self, is_rejected: Tensor) -> None:
        if self._profiler is not None:
            self.run.diagnostics.best_effort("profile").run(self._profiler.step)
            if self._is_done:
                self.closed()

    def closed(self) -> None:
        """Stop recording. Without effect once it has stopped."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        if not self._is_done:
            text = "metrics.profile: the run ended before steps %d to %d were recorded: they have no profile"
            logger.warning(text, self._first_step, self._first_step + self._num_steps - 1)

    def _write(self, recorded: profile) -> None:
        if self._profiler is None:  # stopped before the last step
            return
        path = self._folder / TRACE
        recorded.export_chrome_trace(str(path))
        self._is_done = True
        steps = counted(self._num_steps, "step")
        logger.info("profile of %s from step %d on: %s, for https://ui.perfetto.dev", steps, self._first_step, path)
