"""How many micro-batches a step has where that changes: as planned, or as the noise scale permits; the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.distributed.agree import gather_from_ranks
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.logger import get_logger
from trainer.metrics.noise_scale.estimate import RECENT, NoiseScaleAverage
from trainer.micro_batches import AutoRule, MicroBatches
from trainer.wording import number_text

logger = get_logger(__name__)

AGREEING_Z = 0.67  # normal quantile of the recent steps' bound, of which there are two


class Evidence(NamedTuple):
    """What a decision went by, in sequences."""

    low: float | None
    """Lower bound of the noise scale that two windows without a common step agree on; None: not known."""
    value: float | None
    """The noise scale itself; None: it has no upper bound yet."""
    batch: float
    """Of the last step, over all ranks; 0: not known."""
    key: str
    """Which noise scale."""


@dataclass(eq=False, repr=False)
class BatchGrowth:
    """Decides on the micro-batches of each step.

    `auto` decides between a step that `AutoRule.decides_after` names and the next one. The loop reads such a step's numbers
    before it launches the next, so a decision depends neither on which other steps are read early nor on where the run was
    resumed.

    Attributes:
        plan: changes during the run.
        micro_tokens: tokens of a full micro-batch over all ranks; 0: not known.
        noise: averages of the noise scale, with `auto`.
        guard: of the noise scale. Where it has failed on any rank, nothing changes on any.
    """

    plan: MicroBatches
    micro_tokens: int
    noise: NoiseScaleAverage | None
    guard: BestEffort
    world_size: int

    def lr_factor(self, num_micros: int) -> float:
        """What the schedule's learning rate is multiplied by in a step of so many micro-batches."""
        return self.plan.lr_factor(num_micros)

    def of_step(
        self, step: int, *, before: int, changed_at: int, tokens_before: int
    ) -> tuple[int, Mapping[str, Any] | None]:
        """The micro-batches of `step`, and the event that reports a change. Communicates where `auto` decides.

        Args:
            before: micro-batches of the step before; 0: there is none, or it is not known.
            changed_at: the first step with so many.
            tokens_before: tokens through step - 2.
        """
        plan, evidence = self.plan, None
        if plan.auto is None:
            tokens = tokens_before + before * self.micro_tokens
            num_micros = plan.at(step, tokens)
            reason = f"planned for step {step:,}" if plan.unit == "steps" else f"planned, {tokens:,} tokens are reached"
        elif before == 0:
            num_micros, reason = plan.first, ""
        elif not plan.first <= before <= plan.most:
            num_micros = min(max(before, plan.first), plan.most)
            reason = f"train.micro_batches now allows {plan.first} to {plan.most}"
        else:
            num_micros, evidence = self._decided(plan.auto, step - 1, before, step - changed_at)
            reason = "" if evidence is None else _permission(plan.auto, evidence)
        if before in (0, num_micros):
            return num_micros, None
        numbers = (
            {}
            if evidence is None
            else {"noise_scale": evidence.key, "b_low": evidence.low, "b": evidence.value, "batch": evidence.batch}
        )
        changed = {"event": "micro_batches", "global_step": step, "from": before, "to": num_micros, "reason": reason}
        return num_micros, {**changed, **numbers, "lr_factor": plan.lr_factor(num_micros)}

    def _decided(self, rule: AutoRule, last_step: int, m: int, steps_with_m: int) -> tuple[int, Evidence | None]:
        """m after `last_step`, and what the decision went by if it changes.

        The evidence comes from sums over all ranks and is the same on all of them, but a rank may have failed to take it in: m
        changes only if every rank would change it.
        """
        if not rule.may_double(m, after=last_step, steps_with_m=steps_with_m):
            return m, None
        assert self.noise is not None
        evidence = self.guard.run(evidence_of, self.noise)
        own = evidence is not None and rule.permits(low=evidence.low, batch=evidence.batch)
        is_agreed = all(gather_from_ranks(own, world_size=self.world_size))
        return (2 * m, evidence) if is_agreed else (m, None)


def evidence_of(noise: NoiseScaleAverage) -> Evidence:
    """The noise scale of the batch as it is drawn, where it has an upper bound, otherwise B now. Its lower bound is the lower
    one of two, at the last step and before the recent ones: a doubling cannot be undone, and one bound may be luck."""
    batch = 1.0 / noise.big_noise if noise.big_noise > 0.0 else 0.0
    if noise.drawn is not None:
        return Evidence(noise.drawn.low, noise.drawn.value, batch, "gns/b_drawn")
    found = [noise.history.current(before=steps, recent_z=AGREEING_Z) for steps in (0, RECENT)]
    lows = [current.ratio.low for current in found if current is not None and current.ratio.low is not None]
    value = None if found[0] is None else found[0].ratio.value
    return Evidence(min(lows) if len(lows) == len(found) else None, value, batch, "gns/b_now")


def _permission(rule: AutoRule, evidence: Evidence) -> str:
    low = "?" if evidence.low is None else number_text(evidence.low)
    return (
        f"the noise scale ({evidence.key}) is at least {low} sequences, more than {rule.multiple:g} times the batch of "
        f"{number_text(evidence.batch)}"
    )
