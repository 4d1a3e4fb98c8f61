"""The last line of a run that has not determined its noise scale: what would."""

from __future__ import annotations

import math
import sys

from trainer.metrics.logger import get_logger
from trainer.metrics.noise_scale.estimate import BLOCKS, HIGH_QUANTILE, SHORTENED, NoiseScaleAverage, t_quantile
from trainer.training.extension import Extension
from trainer.wording import number_text

logger = get_logger(__name__)


class NoiseOutlook(Extension):
    """Logs `outlook` when the run ends."""

    def closed(self) -> None:
        """The run ends."""
        if self.run.gns is not None and (sentence := outlook(self.run.gns)):
            logger.info("%s", sentence)


def outlook(noise: NoiseScaleAverage) -> str:
    """How many more steps, or sequences per step, give `gns/b_now` a value if noise and signal stay as they are; empty where it
    has one, and before it has a bound.

    The variance of |G|^2 falls with the number of steps, and with the sequences per step or their square: the signal's part and
    the noise's. Where |G|^2 is below its own error, that error stands for it.
    """
    current = noise.history.current()
    if current is None or current.ratio.value is not None:
        return ""
    _, used, longest = current
    signal, error = float(longest.now[1]), math.sqrt(longest.covariance[1, 1])
    relative = math.sqrt(used.covariance[1, 1]) / max(signal, error, sys.float_info.min)
    # What the variance is too large by: with a scatter known from many steps, and from as few as now.
    later, now = ((t_quantile(HIGH_QUANTILE, freedom) * relative) ** 2 for freedom in (BLOCKS, used.freedom))
    batch, times = 1.0 / noise.big_noise, max(now, 1.1)
    numbers = math.ceil(used.steps / SHORTENED * max(later - 1.0, 0.1)), batch * math.sqrt(times), batch * times, batch
    steps, least, most, today = (number_text(float(f"{number:.2g}")) for number in numbers)
    known = f", it is at least {number_text(current.ratio.low, 3)} sequences" if current.ratio.low else ""
    takes = f"about {steps} more steps, or {least} to {most}"
    if signal <= error:
        takes = f"more than {steps} more steps, or more than {least}"
    return f"gns/b_now has no value yet{known}: it takes {takes} sequences per step instead of {today}"
