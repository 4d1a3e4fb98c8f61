"""The number of micro-batches of a step: as planned, or as the noise scale permits.

It could go if every run kept its batch (`train.micro_batches` a number).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.distributed.env import gather_from_ranks
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.logger import get_logger
from trainer.metrics.noise_scale.estimate import RECENT, NoiseScaleAverage
from trainer.options import AutoRule, MicroBatches
from trainer.wording import number_text

logger = get_logger(__name__)

AGREEING_Z = 0.67  # normal quantile of the recent steps' bound, of which there are two


class Evidence(NamedTuple):
    """The numbers behind a decision, in sequences."""

    low: float | None  # of the noise scale, which two windows without a common step agree on
    value: float | None  # the noise scale itself; None: it has no upper bound yet
    batch: float  # of the last step, over all ranks; 0: not known
    key: str  # which noise scale


@dataclass(eq=False, repr=False)
class BatchGrowth:
    """Decides on the micro-batches of each step.

    `auto` decides between a step that is a multiple of the rule's `every` and the next one. The
    loop reads that step's numbers before it launches the next, so a decision depends neither on
    which other steps are read early nor on where the run was resumed.
    """

    plan: MicroBatches  # changes during the run
    micro_tokens: int  # of a full micro-batch over all ranks; 0: not known
    noise: NoiseScaleAverage | None  # with `auto`
    guard: BestEffort  # of the noise scale: if it failed on any rank, nothing changes on any
    world_size: int

    def lr_factor(self, num_micros: int) -> float:
        return self.plan.lr_factor(num_micros)

    def of_step(
        self, step: int, *, before: int, changed_at: int, tokens_before: int
    ) -> tuple[int, Mapping[str, Any] | None]:
        """The micro-batches of `step`, and the event of a change. Communicates if `auto` decides.

        Args:
            before: micro-batches of the step before; 0: there is none, or it is not known.
            changed_at: the first step with so many.
            tokens_before: tokens through step - 2.
        """
        plan, evidence = self.plan, None
        if plan.auto is None:
            tokens = tokens_before + before * self.micro_tokens
            num_micros, reason = plan.at(step, tokens), f"planned, {tokens:,} tokens are reached"
            if plan.unit == "steps":
                reason = f"planned for step {step:,}"
        elif before == 0:  # a run that begins, or resumes without its last batch
            num_micros, reason = plan.first, ""
        elif not plan.first <= before <= plan.most:  # the config has changed since the last step
            num_micros = min(max(before, plan.first), plan.most)
            reason = f"train.micro_batches now allows {plan.first} to {plan.most}"
        else:
            num_micros, reason = before, ""
            evidence = self._permission(plan.auto, step - 1, before, step - changed_at)
            if evidence is not None:
                num_micros, reason = 2 * before, _sentence(plan.auto, evidence)
        if before in (0, num_micros):  # nothing to report
            return num_micros, None
        event = {"event": "micro_batches", "global_step": step, "from": before, "to": num_micros}
        event |= {"reason": reason}
        if evidence is not None:
            event |= {"noise_scale": evidence.key, "b_low": evidence.low}
            event |= {"b": evidence.value, "batch": evidence.batch}
        return num_micros, {**event, "lr_factor": plan.lr_factor(num_micros)}

    def _permission(self, rule: AutoRule, last_step: int, m: int, steps_with_m: int) -> Evidence | None:
        """The evidence by which m doubles after `last_step`; None: it does not."""
        if not may_double(rule, m, after=last_step, steps_with_m=steps_with_m):
            return None
        assert self.noise is not None
        evidence = self.guard.run(evidence_of, self.noise)
        own = evidence is not None and permits(rule, low=evidence.low, batch=evidence.batch)
        # The evidence is the same on all ranks, but one of them may have failed to take it in.
        is_agreed = all(gather_from_ranks(own, world_size=self.world_size))
        return evidence if is_agreed else None


def may_double(rule: AutoRule, m: int, *, after: int, steps_with_m: int) -> bool:
    """Whether it is time to ask for permission after a step, the last of so many with m."""
    is_asked = after > 0 and after % rule.every == 0
    return is_asked and steps_with_m >= rule.every and 2 * m <= rule.max


def permits(rule: AutoRule, *, low: float | None, batch: float) -> bool:
    """Whether the noise scale's lower bound permits a larger step; None, 0: not known."""
    return low is not None and batch > 0 and low > rule.multiple * batch


def evidence_of(noise: NoiseScaleAverage) -> Evidence:
    """B now, and the batch."""
    batch = 0.0
    if noise.big_noise > 0.0:
        batch = 1.0 / noise.big_noise
    now, before = (noise.history.current(before=steps, recent_z=AGREEING_Z) for steps in (0, RECENT))
    if now is None:
        return Evidence(None, None, batch, "gns/b_now")  # too few windows so far
    low = None
    # The lower bound of two, now and before the recent steps: a doubling cannot be undone, and one
    # may be luck.
    if before is not None and now.ratio.low is not None and before.ratio.low is not None:
        low = min(now.ratio.low, before.ratio.low)
    return Evidence(low, now.ratio.value, batch, "gns/b_now")


def _sentence(rule: AutoRule, evidence: Evidence) -> str:
    assert evidence.low is not None  # or the rule would not have permitted it
    scale = f"the noise scale ({evidence.key}) is at least {number_text(evidence.low)} sequences"
    limit = f"{rule.multiple:g} times the batch of {number_text(evidence.batch)}"
    return f"{scale}, more than {limit}"
