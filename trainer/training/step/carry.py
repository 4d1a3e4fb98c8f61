"""The probe of carry in a training step: what it needs of a micro-batch, and the time that it takes."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.ledger.ledger import Ledger
from trainer.ledger.probe import CarryProbe
from trainer.metrics.aggregate import Reported
from trainer.metrics.tracker import MetricsTracker
from trainer.training.step.microbatch import Carry, MicroBatch

TIME_KEY = "time/probe_sec"


class StepProbe:
    """Probes the micro-batches of a step.

    Args:
        ledger: where the states are looked up.
        tracker: its step times leave the probe out, as they do evaluations.
    """

    metric_keys = (*CarryProbe.metric_keys, TIME_KEY)

    def __init__(self, probe: CarryProbe, *, ledger: Ledger, tracker: MetricsTracker, device: torch.device) -> None:
        self._probe = probe
        self._ledger = ledger
        self._tracker = tracker
        self._device = device
        self._seconds = 0.0

    def measure(self, micro: MicroBatch, carry: Carry, state: Tensor) -> None:
        """Measure a micro-batch, between its lookup [B, state_width] and its forward."""
        with self._tracker.outside():
            began = self._clock()
            try:
                self._probe.measure(
                    micro.inputs,
                    micro.targets,
                    group_ids=carry.group_ids,
                    cell_index=carry.cell_index,
                    tokens_before=micro.extras.get("tokens_before"),
                    resets_before=micro.extras.get("resets_before"),
                    state=state,
                    age=self._ledger.lookup_age(),
                )
            finally:
                self._seconds += self._clock() - began

    def drain_metrics(self) -> Mapping[str, Reported]:
        """What was measured since the last drain, and its time; {} if nothing was."""
        drained = self._probe.drain_metrics()
        seconds, self._seconds = self._seconds, 0.0
        return {**drained, TIME_KEY: seconds} if drained else {}

    def _clock(self) -> float:
        """Seconds, once the device has done what was queued: on the few steps that probe, which log, waiting costs little."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
