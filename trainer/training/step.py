"""One optimizer step: accumulate a window of micro-batches, launch the update, finish.

Weights. The loss of a step is the sum of the token losses of all micro-batches of all ranks,
divided by their number of tokens N, as for one big batch on one rank. The host knows only its own
share of N before the window; N itself takes a collective. To save that one, each micro-batch is
scaled by the same constant kappa, 1 / (the most tokens that a rank's window can hold; all ranks
have equally many micro-batches). DDP or FSDP averages over the W ranks, and the gradient is divided
by c = kappa N / W when it is clipped, in the multiplication that clipping needs anyway.

Collectives. Besides those of DDP or FSDP there is one all-reduce per step, of token and loss sums,
the flags of each rank, the noise scale's sums and the squared gradient norm, of which a rank may
hold shards only. A NaN on one rank is a NaN in the sum, so all ranks see it. Extensions that sum
over ranks share a second all-reduce after the update.

Waiting. `launch` decides on the device whether the optimizer steps, and copies the numbers to the
host; `finish` reads them. The loop calls `finish` after the next step is launched, so that the
device always has work. Nothing has to be undone: a bad step changed no weight, and a step without
tokens changed nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.arrays import IGNORED, weights_of
from trainer.data.loader import MicroBatch
from trainer.distributed.strategy import Strategy
from trainer.ledger.ledger import Ledger
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.gradient_noise import GradientNoiseScale, norms_of, square_sum
from trainer.metrics.noise_scale import NUM_SUMS, RANKS
from trainer.objective import Auxiliary, Loss, ObjectiveOutput
from trainer.on_device import HostCopy, scale_gradients, seed_model, step_unless, supports_found_inf
from trainer.training import Graphs
from trainer.training.extension import Extensions, Flag, Measured, StepOutcome
from trainer.training.optimizer import set_lr

# Positions in the reduced vector: after the flags come the noise scale's sums, then the squared
# gradient norm.
TOKENS, LOSS_SUM, FLAGS = range(3)
HEAD = FLAGS + len(Flag)


@dataclass(frozen=True)
class Launched:
    """A step whose work is queued and whose numbers are on their way to the host."""

    numbers: HostCopy
    kappa: float  # the factor on the sum of token losses in this step's backward
    ready_at: float
    """When this rank reached the backward that reduces the gradient over ranks, by its clock."""
    measured: Measured | None = None  # the sums of extensions


@dataclass(kw_only=True, eq=False, repr=False)
class TrainStep:
    """Runs optimizer steps."""

    model: nn.Module
    """The model as its strategy runs it: wrapped by DDP, sharded, or itself on a single rank."""
    ledgers: Sequence[Ledger]
    """Hold the recurrent states of each of `shards`; empty for a model without state."""
    objective: Loss
    optimizer: torch.optim.Optimizer
    """With one that does not support `found_inf`, `launch` waits for the device."""
    gns: GradientNoiseScale | None  # hooks of the noise scale; None if it is off
    max_tokens_per_micro: int
    clip_grad_norm: float
    world_size: int
    device: torch.device
    autocast: Callable[[], AbstractContextManager[None]]
    """Makes the context in which forward and loss run."""
    extensions: Extensions
    """Called at the moments of the step."""
    shards: Sequence[int] = (0,)
    """The numbers of this rank's data shards, which have equally many micro-batches in a step."""
    seed: int = 0
    """Seeds dropout and other draws of every micro-batch, which depend on nothing earlier."""
    auxiliary: Auxiliary = field(default_factory=Auxiliary)
    """Adds the losses and metrics of the model's output."""
    strategy: Strategy = field(default_factory=Strategy)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    """Guards the noise scale, whose failure never costs the step."""
    lane_sets: Mapping[int, int] = field(default_factory=dict)
    """Micro-batches of a shard in a step -> sets of lanes; empty: rows are not full."""
    graphs: Graphs | None = None  # CUDA graphs that replace `run_micro`

    def __post_init__(self) -> None:
        self._gns_guard = self.diagnostics.best_effort("gns")
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._decides_on_device = supports_found_inf(self.optimizer)
        self._kappa = 1.0 / self.max_tokens_per_micro  # of the step that accumulates
        self._loss_sum = self._tokens = torch.zeros((), dtype=torch.float64, device=self.device)
        self.ready_at = 0.0  # when the last micro-batch began or was run

    def accumulate(self, step: int, window: Sequence[MicroBatch], *, is_logged: bool = False) -> None:
        """Run forward and backward of this rank's micro-batches, and store their states.

        `step` is the ledger's clock, and keys random draws; `is_logged`: all extensions measure it.
        """
        for each in self.ledgers:
            each.begin_step(step)
        self._kappa = 1.0 / (len(window) * self.max_tokens_per_micro)
        extensions = self.extensions
        extensions.begin_step(is_logged=is_logged)
        if self.auxiliary.by_rows:
            self.auxiliary.begin_window(window, world_size=self.world_size)
        if self.gns is not None:
            m = len(window) // len(self.shards)
            num_sets = self.lane_sets.get(m, 0)
            # What `data.mixing.spread` has come to.
            about: dict[str, Any] = {"spread": max(num_sets // m, 1), "by_rank": 0 < num_sets < m}
            self._gns_guard.run(self.gns.begin_window, len(window), **about)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._tokens = torch.zeros_like(self._loss_sum)  # counts in float64 are exact
        drawn = [0] * len(self.shards)
        for index, micro in enumerate(window):
            is_last = index == len(window) - 1
            ledger = self.ledgers[micro.shard] if self.ledgers else None
            carry, state = micro.carry, None
            if ledger is not None and carry is not None:
                state = ledger.lookup(carry.group_ids, carry.cell_index)  # [B, state_width]
            # By shard and number, not by rank: the draws are the same on any number of ranks.
            seed_model(self.device, self.seed, step, self.shards[micro.shard], drawn[micro.shard])
            drawn[micro.shard] += 1
            # Gradients are reduced over ranks in the last backward only.
            with nullcontext() if is_last else self.strategy.no_sync():
                if self.gns is not None:
                    rows = 0.0 if carry is None else float(carry.cell_index.mean())
                    self._gns_guard.run(self.gns.begin_micro, is_last, groups=micro.documents, rows_before=rows)
                self.ready_at = time.perf_counter()
                if self.graphs is None:
                    end, result = self.run_micro(micro, state, self._kappa)
                else:
                    end, result = self.graphs(self, micro, state, self._kappa, index == 0, is_last)
            if ledger is not None and carry is not None and end is not None:
                ends = {"end_ids": carry.end_ids, "end_cell_index": carry.end_cell_index}
                ledger.store(carry.group_ids, carry.cell_index, carry.is_last, end, **ends)
            for measure in extensions.on_micro:
                measure(micro, result)
            self._loss_sum += result.loss_sum.detach()
            self._tokens += result.num_tokens

    def run_micro(
        self, micro: MicroBatch, state: Tensor | None, kappa: float | Tensor
    ) -> tuple[Tensor | None, ObjectiveOutput]:
        """Forward, loss and backward of a micro-batch, without reads: a CUDA graph can replace it.

        `state`: before its rows, [B, state_width]; `kappa`: factor on its sum of losses.
        """
        auxiliary = self.auxiliary
        with self.autocast():
            output = self.model(**micro.inputs, state=state)
            result = self.objective(output.logits, micro.targets, meta=micro.located)
            extras = getattr(output, "losses", None), getattr(output, "metrics", None)
            if auxiliary.losses or extras != (None, None):
                result = auxiliary(result, output, micro)
        self.ready_at = time.perf_counter()
        scaled: Any = result.loss_sum * kappa  # torch leaves backward without types
        scaled.backward()
        if self.gns is not None:
            row_tokens = (micro.targets != IGNORED).sum(dim=1)  # [B]
            if micro.targets.is_floating_point():
                row_tokens = weights_of(micro.targets).sum(dim=1)
            # In float64: integers times a float would be a float32, and rounding the only error.
            tokens = row_tokens.sum().double()
            self._gns_guard.run(self.gns.end_micro, tokens * kappa, row_tokens)
        return output.state, result

    def launch(self, *, lr: float, flags: Flag = Flag.NONE) -> Launched:
        """Reduce over ranks, scale and clip the gradient, and update unless the step is bad.

        `flags`: what this rank says. A UserError if the gradient is not averaged, since a parameter
        had no part in it.
        """
        # Filled on the device: a tensor made from host numbers would be copied, and waited for.
        votes = [torch.full_like(self._tokens, flag in flags) for flag in Flag]
        packed = torch.stack([self._tokens, self._loss_sum, *votes])
        if self.gns is not None:
            sums = self._gns_guard.run(self.gns.local_sums)
            if sums is None:  # failed on this rank: the vector keeps its length on all ranks
                sums = packed.new_zeros(NUM_SUMS)
            packed = torch.cat([packed, sums])
        # A parameter without a part in the loss has no gradient.
        used, own = [], []
        for parameter in self.parameters:
            if parameter.grad is not None:
                used.append(parameter)
                own.append(parameter.grad)
        gradients = self.strategy.reduced(own)
        if self.extensions.on_gradient:
            squares = [square_sum(norms_of([gradient])) for gradient in gradients]
            for look in self.extensions.on_gradient:
                look(dict(zip(used, squares, strict=True)))
        own_sq = square_sum(norms_of(gradients))
        # Over the ranks that hold the same gradient, so that their sum counts it once.
        packed = torch.cat([packed, own_sq.reshape(1) / self.strategy.copies])
        if self.world_size > 1:
            dist.all_reduce(packed)
        # Copied before the optimizer's work is queued, for which `finish` then does not wait.
        numbers = HostCopy(packed)
        tokens, loss_sum, grad_sq = packed[TOKENS], packed[LOSS_SUM], packed[-1]
        is_bad = ~(loss_sum.isfinite() & grad_sq.isfinite()) | (tokens == 0)
        # Gradients are the mean over the ranks.
        scale_gradients(gradients, tokens * self._kappa / self.world_size, grad_sq, self.clip_grad_norm)
        set_lr(self.optimizer, lr)  # also in a step that is skipped
        if self._decides_on_device:
            step_unless(is_bad, self.optimizer)
        elif not bool(is_bad):  # waits for the device
            self.optimizer.step()
        # After the update, whose result they may look at, and before the gradients are gone.
        measured = self.extensions.sum_up(is_bad)
        self.optimizer.zero_grad(set_to_none=True)  # frees their memory for the next forward
        return Launched(numbers, self._kappa, self.ready_at, measured)

    def finish(self, launched: Launched) -> StepOutcome:
        """Read the numbers of a launched step. Steps are finished in the order of their launch."""
        *reduced, grad_sq = launched.numbers.read()
        tokens, loss_sum = reduced[TOKENS], reduced[LOSS_SUM]
        # The gradient is c times that of the mean loss.
        factor = launched.kappa * tokens / self.world_size
        is_finite = math.isfinite(loss_sum) and math.isfinite(grad_sq)
        if self.gns is not None and tokens > 0:
            if reduced[HEAD + RANKS] != self.world_size:
                # It failed on a rank: its averages would stand still, and look like measurements.
                self._gns_guard.enabled = False
            else:
                self._gns_guard.run(self.gns.finish, reduced[HEAD:], grad_sq, grad_factor=factor)
        flags = Flag.NONE
        for flag, ranks in zip(Flag, reduced[FLAGS:HEAD], strict=True):
            if ranks == self.world_size or (ranks and flag is not Flag.EXHAUSTED):
                flags |= flag
        return StepOutcome(
            flags=flags,
            is_finite=is_finite,
            loss=loss_sum / tokens if tokens else math.nan,
            tokens=int(tokens),
            tokens_trained=int(tokens) * is_finite,
            grad_norm=math.sqrt(grad_sq) / (factor or 1.0),
            grad_factor=factor,
        )
