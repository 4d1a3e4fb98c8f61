"""Arithmetic of the gradient noise scale: floats in, floats out, no torch.

`B_simple = tr(Sigma) / |G|^2` (McCandlish et al. 2018, appendix A.1) is the batch size at which the
noise of the gradient equals its signal. A window's micro-batches have independent gradients h, each
with mean `kappa * G`: kappa is the factor on the micro-batch's *mean* loss before the backward. So
the inner product of two of them averages `kappa_j kappa_k |G|^2`, and all pairs together are `|sum
of h|^2 - sum of |h|^2`; the rest of `sum of |h|^2` is noise, of single tokens or of whole rows.

The unit, the effective number of examples, comes from the examples' weights w: a micro-batch has
1 / v, with `v = sum(w^2) / sum(w)^2` (Kish 1965), the window 1 / V, with `V = sum(kappa^2 v) /
sum(kappa)^2`, and `tr(Sigma)` is the noise of the window's mean gradient over V.

A middle group between micro-batches and window (each rank's sum; on one rank, that of the first
half) separates pairs within groups from other pairs, which give the same noise if micro-batches are
independent.

An average over past steps lags behind a process that drifts, so `History` fits a straight line to
the past and reads S and |G|^2 off at the last step; the data decide how long the window may be. A
line cannot rule out a jump in the last steps, so the bounds include those of these steps alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.wording import counted

# Indices into the vector of sums. Every entry adds up over ranks, so one SUM all-reduce gives the
# window's vector.
KAPPA = 0  # sum of kappa over micro-batches
KAPPA_SQUARE = 1  # sum of kappa^2
SMALL_SQUARE = 2  # sum of |h|^2, h the gradient of one micro-batch as the leaf's hook sees it
SMALL_NOISE = 3  # sum of kappa * v
BIG_NOISE = 4  # sum of kappa^2 * v
MIDDLE_OWN_KAPPA = 5  # `KAPPA_SQUARE` of the micro-batches of this rank's middle group
MIDDLE_OWN_SQUARE = 6  # `SMALL_SQUARE` of those
MIDDLE_KAPPA = 7  # square of their sum of kappa
MIDDLE_SQUARE = 8  # |A|^2, A the gradient accumulated over them, before any reduction
TOKENS = 9  # sum of the examples' weights if those are token counts, else 0
RANKS = 10  # 1 from every rank
FAULTS = 11  # micro-batches whose norm cannot be trusted (see `trainer.metrics.gradient_noise`)
REPEATED = 12  # micro-batches with a document that an earlier one of the window has, too
ROWS_BEFORE = 13  # mean number of rows of its document before a row, summed over ranks
NUM_SUMS = 14

MIN_SPREAD = 1e-3  # a smaller share of pairs in the square of kappa's sum is one micro-batch
MIN_PAIRS = 5  # fewer pairs do not give a usable standard error
CONSISTENCY_CAP = 1000.0  # stands for infinity, which JSON cannot represent
# Normal quantiles of the two bounds of a ratio. The upper one is strict because a point is reported
# only where it exists: a run looks hundreds of times, and at 97.5 % the few luckiest windows would
# report a B far too small, with a bound that excludes the truth.
LOW_QUANTILE = 1.96  # the ratio is below the lower bound in 2.5 % of all windows
HIGH_QUANTILE = 3.72  # the ratio is above the upper bound in 0.01 % of all windows
QUANTILES = LOW_QUANTILE, HIGH_QUANTILE
BLOCKS = 32  # of one length, before two of them become one of twice that length
FEWEST_BLOCKS = 4  # likewise of one phase
MIN_WINDOWS = 8  # a line has two parameters, and the scatter about it has to be known
MIN_STRETCHES = 8  # independent ones; fewer do not tell how far the averages scatter
FORGOTTEN = 1e-9  # weight of a pair in an exponential average below which it is dropped
RECENT = 3  # steps after which bounds hold again if S or |G|^2 jumps
LARGEST_JUMP = 4.0  # of B that the bounds allow for before the steps show one
GROWTH = 1.4  # of the window from one candidate to the next
TOLERANCE = 2.0  # normal quantile within which a window's fit agrees with all shorter ones
LEAST_FREE = 0.1  # share of a stretch's residual that its own leverage leaves, at least
ROUNDING = 1e-9  # relative difference that says nothing
SHORTENED = 0.5  # share of the longest window without visible curvature that is used


@dataclass(frozen=True)
class Window:
    """Unbiased estimates from one step, never clamped: `tr_sigma` and `grad_sq` may be negative."""

    tr_sigma: float  # estimate of tr(Sigma), per example
    grad_sq: float  # estimate of |G|^2
    between: float | None  # tr(Sigma) from pairs across middle groups; None if the layout has none
    within: float | None  # and from pairs within them
    small_noise: float  # v, averaged by kappa
    big_noise: float  # V
    num_tokens: float  # of the step over all ranks, 0 if unknown
    rows_before: float  # of its document before a row, on average
    world_size: int


@dataclass(frozen=True)
class Absent:
    """Why a window gives no estimate: its own fault, or a layout that can never give one."""

    reason: str
    is_fault: bool
    is_repeated: bool = False  # two micro-batches of the step have rows of one document


def estimate(sums: Sequence[float], grad_sq: float, *, grad_factor: float | None = None) -> Window | Absent:
    """The unbiased estimates of one window: means over pairs and micro-batches, weighted by kappa.

    `sums` are summed over ranks; `grad_sq` is the square norm of the optimizer's gradient before
    clipping, which is `grad_factor` times that of the weighted mean loss. None: the sum of kappa
    over the number of ranks, as DDP's average leaves it; 1.0 if the loop has divided by it, as
    `GradScaler.unscale_` does.
    """
    assert len(sums) == NUM_SUMS, f"expected {NUM_SUMS} sums, got {len(sums)}"
    if sums[FAULTS] > 0.0:
        reason = "a micro-batch's norm is unknown: kappa was 0 with a gradient, or a hook ran never or twice"
        return Absent(reason, is_fault=True)
    if not all(map(math.isfinite, (*sums, grad_sq))):
        return Absent("a gradient of the window was not finite", is_fault=True)
    if sums[REPEATED] > 0.0:
        reason = "two micro-batches of the step have rows of the same document, so they are dependent"
        reason += ": more documents, or fewer rows in a step, help"
        return Absent(reason, is_fault=False, is_repeated=True)
    kappa = sums[KAPPA]
    factor = kappa / sums[RANKS] if grad_factor is None else grad_factor
    if kappa <= 0.0 or factor <= 0.0 or sums[BIG_NOISE] <= 0.0:
        return Absent("no micro-batch of the window had a target token", is_fault=True)
    whole, own = kappa * kappa, sums[KAPPA_SQUARE]
    big, small = grad_sq / factor / factor * whole, sums[SMALL_SQUARE]
    if whole - own < MIN_SPREAD * whole:
        reason = "the step has a single micro-batch, and two batch sizes are compared: accumulate two"
        return Absent(reason, is_fault=False)
    mean_sq = (big - small) / (whole - own)
    between = within = None
    # On several ranks the middle groups are whole windows, and all of them must be there: a rank
    # has none if a parameter is not used in its last micro-batch, and the measurements of the
    # others would pass for all.
    own_middle, small_middle, whole_middle, square_middle = sums[MIDDLE_OWN_KAPPA : MIDDLE_SQUARE + 1]
    has_middle = own_middle > (0.0 if sums[RANKS] == 1.0 else own * (1.0 - 1e-9))
    pairs = whole_middle - own_middle
    others = whole - own - pairs
    # Without both kinds of pairs, the divisor would be rounding.
    if has_middle and pairs >= MIN_SPREAD * whole_middle and others >= MIN_SPREAD * whole:
        unit = own / sums[BIG_NOISE] / own_middle
        between = unit * (square_middle - whole_middle * (big - small - square_middle + small_middle) / others)
        within = unit * (small_middle - own_middle * (square_middle - small_middle) / pairs)
    return Window(
        tr_sigma=(small - own * mean_sq) / sums[BIG_NOISE],
        grad_sq=mean_sq,
        between=between,
        within=within,
        small_noise=sums[SMALL_NOISE] / kappa,
        big_noise=sums[BIG_NOISE] / kappa / kappa,
        num_tokens=sums[TOKENS],
        rows_before=sums[ROWS_BEFORE] / sums[RANKS],
        world_size=round(sums[RANKS]),
    )


class Ratio(NamedTuple):
    """A ratio of two averages and its bounds; None where the data do not determine it."""

    low: float | None
    high: float | None = None
    value: float | None = None  # None without an upper bound
    # Distance of value and upper bound in units of the bound's quantile: the standard error by the
    # delta method where y is known well, more where that method is too small.
    error: float | None = None


def is_positive(value: float, variance: float, freedom: float, z: float = HIGH_QUANTILE) -> bool:
    """Whether an estimate with this variance is above zero, by the test of the upper bound."""
    t = t_quantile(z, freedom)
    return value > 0.0 and value * value > t * t * variance


def t_quantile(z: float, freedom: float) -> float:
    """Quantile of Student's t where the normal one is z, by the inverse of Wallace (1959).

    Exact for many degrees of freedom; at 4, 0.5 % (z = 1.96) and 6 % (3.72) too large; at 1, the
    fewest that are asked for, 1.4 and 9.6 times too large.
    """
    z *= (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    return math.sqrt(freedom * math.expm1(z * z / freedom))


@dataclass(frozen=True)
class Fit:
    """x and y at the last step by the last `steps` windows."""

    steps: int
    now: NDArray[np.float64]  # [2]
    covariance: NDArray[np.float64]  # [2, 2] of `now`
    freedom: float
    stretches: float  # independent ones; without `MIN_STRETCHES` of them there is no upper bound

    def ratio(self, z: tuple[float, float] = QUANTILES) -> Ratio:
        """x / y with bounds by Fieller (1954), "Some problems in interval estimation".

        The bounds are the ratios r for which `x - r y` is t_low above or t_high below zero, in its
        own standard errors. Nothing is divided by y, so they hold for any y. A noise scale is not
        negative, so the part of the confidence set below zero is left out.

        x and y are unbiased and about normal. `z`: normal quantiles of the two bounds.
        """
        (x, y), ((var_x, cov), (_, var_y)) = self.now.tolist(), self.covariance.tolist()
        # A few stretches give a scatter, of so few degrees of freedom that it still bounds B from
        # below.
        if self.stretches < MIN_STRETCHES / 2:
            return Ratio(None)
        # The roots of a r^2 - 2 b r + k are the r at which `x - r y` is t of its errors away from
        # zero; b^2 - a k is written without cancellation.
        spread = x * x * var_y - 2.0 * x * y * cov + y * y * var_x
        product = var_x * var_y - cov * cov
        t = t_quantile(z[0], self.freedom)
        low: float | None = 0.0
        k = x * x - t * t * var_x
        if x > 0.0 and k > 0.0:
            divisor = x * y - t * t * cov + t * math.sqrt(max(spread - t * t * product, 0.0))
            low = k / divisor if divisor > 0.0 else None
        # Eight phases of unequal weight are a little fewer.
        if round(self.stretches) < MIN_STRETCHES or not is_positive(y, var_y, self.freedom, z[1]):
            return Ratio(low)
        t = t_quantile(z[1], self.freedom)
        root = t * math.sqrt(max(spread - t * t * product, 0.0))
        high = (x * y - t * t * cov + root) / (y * y - t * t * var_y)
        return Ratio(low, high, x / y, (high - x / y) / t)


class Current(NamedTuple):
    """The noise scale at the last step."""

    ratio: Ratio  # the bounds allow for a jump
    steps: int  # the windows that the value comes from: the last ones with an estimate


@dataclass
class Stretches:
    """Which windows share documents, so that their noise is not independent: a document's next row
    comes `spread` steps later, so the windows of a phase (modulo the spread) within a document's
    length are one stretch."""

    spread: int = 1
    rows: float = 1.0  # that documents have lasted so far: of the document of a token, on average

    def numbered(self, phases: NDArray[np.float64], ages: NDArray[np.float64]) -> NDArray[np.int64]:
        """The number of each window's stretch, from 0. `ages`: in windows."""
        blocks = np.floor(ages / (self.rows * self.spread))
        return np.unique(np.stack([phases, blocks]), axis=1, return_inverse=True)[1].reshape(-1)


def sums_of(values: NDArray[np.float64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """[stretches, ...]: the sums of `values` [windows, ...] over the windows of each stretch."""
    sums = np.zeros((numbers.max(initial=-1) + 1, *values.shape[1:]))
    np.add.at(sums, numbers, values)
    return sums


class History:
    """Pairs (x, y) of all windows: the latest singly, older ones in sums over 2, 4, 8, ... of a
    phase.

    Of a spread, at most `BLOCKS` sums of each length are kept, or `FEWEST_BLOCKS` of each phase:
    its size grows with the windows' logarithm.
    """

    def __init__(self, stretches: Stretches | None = None) -> None:
        self._stretches = stretches or Stretches()
        self._count = 0
        # By phase, sums over 2^level windows, oldest first: of their numbers, of x, and of y.
        self._phases: dict[int, list[list[tuple[float, float, float]]]] = {}

    def add(self, x: float, y: float, phase: int = 0) -> None:
        """Add a window's pair. `phase`: see `Stretches`."""
        self._count += 1
        most = max(BLOCKS // self._stretches.spread, FEWEST_BLOCKS)
        levels = self._phases.setdefault(phase, [[]])
        block = (float(self._count), x, y)
        for level in levels:
            level.append(block)
            if len(level) <= most:
                return
            # The two oldest become one block of the next level.
            first, second = level.pop(0), level.pop(0)
            block = (first[0] + second[0], first[1] + second[1], first[2] + second[2])
        levels.append([block])

    def current(self) -> Current | None:
        """x / y at the last step with its bounds; None before `MIN_WINDOWS` pairs."""
        fits = list(self._fits())
        if not fits:
            return None
        longest = longest_straight(fits)
        # Half of it: curvature that is just invisible would still shift the line's end by about its
        # standard error. It grows with the square of the window.
        enough = max(SHORTENED * longest.steps, min(MIN_WINDOWS, longest.steps))
        used = max((fit for fit in fits if fit.steps <= enough), key=lambda fit: fit.steps)
        ratio, recent = used.ratio(), fits[0].ratio((LOW_QUANTILE, LOW_QUANTILE))
        low, high = ratio.low, ratio.high
        if low is not None:
            low = min(low, max(recent.low or 0.0, low / LARGEST_JUMP))
        if high is not None:
            likely = used.ratio((LOW_QUANTILE, LOW_QUANTILE)).high or high
            high = max(high, min(recent.high or math.inf, likely * LARGEST_JUMP))
        return Current(ratio._replace(low=low, high=high), used.steps)

    def _fits(self) -> Iterator[Fit]:
        """Fits over growing windows: `_recent_mean`, then lines."""
        # Weighted least squares with the heteroscedasticity-consistent covariance HC3 (MacKinnon
        # and White 1985), of sums over stretches: the noise of both series changes with their size.
        # Degrees of freedom are Satterthwaite's, for equal noise in every step.
        found = []
        for phase, levels in self._phases.items():
            for level, blocks in enumerate(levels):
                found += [(1 << level, phase, *block) for block in blocks]
        if len(found) < MIN_WINDOWS:
            return
        size, phase, numbers, *totals = np.array(found, dtype=np.float64).T
        age = self._count - numbers / size  # of a block's middle; the last step's is 0
        order = np.argsort(age, kind="stable")  # newest first
        size, age, phases = size[order], age[order], phase[order]
        means = np.stack(totals, axis=1)[order] / size[:, None]  # [blocks, 2]
        numbered, ends = self._stretches.numbered(phases, age), np.cumsum(size)
        # Any others are old, of phases that only a larger spread had.
        latest = np.flatnonzero(size == 1.0)[: max(BLOCKS, FEWEST_BLOCKS * self._stretches.spread)]
        stretches = len(np.unique(numbered[latest]))
        if self._stretches.spread > 1:  # windows next to each other are of other documents
            stretches = MIN_STRETCHES
        yield _recent_mean(means[latest], stretches)
        wanted = float(MIN_WINDOWS)
        while wanted < GROWTH * ends[-1]:
            k = min(int(np.searchsorted(ends, wanted)) + 1, len(ends))
            wanted *= GROWTH
            w, a, z = size[:k], age[:k], means[:k]
            _, own = np.unique(numbered[:k], return_inverse=True)
            share = w / w.sum()
            centre = a - share @ a
            spread = (w * centre) @ centre
            tilt = w * centre / spread
            weight = share - tilt * (share @ a)  # of each block in the value at age 0
            now, slope = weight @ z, tilt @ z
            leverage = sums_of(share + tilt * centre, own)[own]
            residual = weight[:, None] * (z - now - a[:, None] * slope)
            residual = sums_of(residual / np.maximum(1.0 - leverage, LEAST_FREE)[:, None], own)
            parts = sums_of(weight**2 / w, own)
            freedom = max(parts.sum() ** 2 / (parts @ parts) - 2.0, 1.0)
            yield Fit(int(ends[k - 1]), now, residual.T @ residual, float(freedom), len(parts))

    def state_dict(self) -> dict[str, Any]:
        phases = {phase: [[*map(list, level)] for level in levels] for phase, levels in self._phases.items()}
        return {"count": self._count, "phases": [*map(list, phases.items())]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])
        self._phases = {}
        for phase, levels in state["phases"]:
            self._phases[int(phase)] = [[(float(n), float(x), float(y)) for n, x, y in level] for level in levels]


def _recent_mean(pairs: NDArray[np.float64], stretches: int) -> Fit:
    """The mean of the last steps. `pairs`: [n, 2] single steps, newest first."""
    # Differences of successive pairs (von Neumann 1941) give its covariance: a jump enters once.
    # Noise is taken to grow with the level, since it may have grown with it in these steps.
    steps, now, mean = np.diff(pairs, axis=0), pairs[:RECENT].mean(axis=0), pairs.mean(axis=0)
    growth = np.divide(now, mean, out=np.ones(2), where=mean != 0.0).max()
    covariance = steps.T @ steps / (2 * len(steps) * RECENT) * max(growth, 1.0) ** 2
    return Fit(RECENT, now, covariance, len(steps) / 1.5, stretches)


def longest_straight(fits: Sequence[Fit]) -> Fit:
    """The longest window whose fit agrees with those over all shorter ones, in x and in y.

    By the intersection of confidence intervals (Goldenshluger and Nemirovski 1997, "On spatially
    adaptive estimation of nonparametric regression"). A window of few stretches does not know its
    interval.
    """
    low, high = np.full(2, -math.inf), np.full(2, math.inf)
    longest = fits[0]
    for fit in fits:
        if round(fit.stretches) < MIN_STRETCHES:
            longest = fit
            continue
        deviation = np.sqrt(np.diag(fit.covariance))
        margin = t_quantile(TOLERANCE, fit.freedom) * deviation + ROUNDING * abs(fit.now)
        low, high = np.maximum(low, fit.now - margin), np.minimum(high, fit.now + margin)
        if (low > high).any():
            break
        longest = fit
    return longest


class PairAverage:
    """Exponential averages of x and y, means weighted by `ema ** age`, with the covariance of the
    two averages, which comes from the deviations of whole stretches."""

    def __init__(self, ema: float, stretches: Stretches | None = None) -> None:
        self._ema, self._stretches = ema, stretches or Stretches()
        length = math.ceil(math.log(FORGOTTEN) / math.log(ema))
        self.pairs: deque[tuple[float, float, float]] = deque(maxlen=max(length, MIN_PAIRS))  # phase, x, y

    def update(self, x: float, y: float, phase: int = 0) -> None:
        """Add a window's pair. `phase`: see `Stretches`."""
        self.pairs.append((float(phase), x, y))

    def fit(self) -> Fit:
        """The averages with their covariance, which says something from `MIN_PAIRS` pairs on."""
        phases, *columns = np.array(self.pairs, dtype=np.float64).T
        ages, pairs = np.arange(len(phases))[::-1].astype(np.float64), np.stack(columns, axis=1)
        weights = self._ema**ages
        weights /= weights.sum()
        own = self._stretches.numbered(phases, ages)
        means, shares = weights @ pairs, sums_of(weights, own)
        deviations = sums_of(weights[:, None] * (pairs - means), own)
        share = float(shares @ shares)  # 1 / (effective number of stretches)
        covariance = deviations.T @ deviations / max(1.0 - share, LEAST_FREE)
        return Fit(len(pairs), means, covariance, max(1.0 / share - 1.0, 1.0), 1.0 / share)

    def state_dict(self) -> dict[str, Any]:
        return {"pairs": [*map(list, self.pairs)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.pairs.clear()
        self.pairs.extend((float(phase), float(x), float(y)) for phase, x, y in state["pairs"])


class NoiseScaleAverage:
    """The noise scale over many windows: S and |G|^2 are averaged first, their ratio is taken last.

    `ema`: weight of the past, in [0.8, 1); the average spans about `(1 + ema) / (1 - ema)` windows.
    """

    GAUGES = (
        *("small_noise", "big_noise", "world_size", "token_sum", "rows_sum", "weight"),
        *("seen", "skipped", "drained", "left_out", "drained_left_out"),
    )

    def __init__(self, ema: float = 0.95) -> None:
        if not 0.8 <= ema < 1.0:
            raise ValueError(f"ema must be in [0.8, 1), got {ema}")
        self._ema = ema
        self.stretches = Stretches()
        self._noise = PairAverage(ema, self.stretches)  # x = tr(Sigma), y = |G|^2
        self.history = History(self.stretches)  # of the same pairs
        self._consistency = PairAverage(ema, self.stretches)  # x = between, y = within
        self.small_noise = self.big_noise = self.world_size = 0.0  # of the last window with an estimate
        self.shards_per_rank = 1  # data shards, each with a micro-batch of its own at a time
        # Averages of tokens per effective example, and of rows before a row; the sum of weights.
        self.token_sum = self.rows_sum = self.weight = 0.0
        self.seen = 0.0  # windows, also those without an estimate
        # Faults, and windows with rows of one document in two micro-batches, since the start; and
        # the parts of them that `drain_metrics` has reported.
        self.skipped = self.left_out = self.drained = self.drained_left_out = 0.0
        self._absent: str | None = "no window has been seen"

    def update(self, window: Window | Absent) -> None:
        """Add one window. One without an estimate is counted and changes no average."""
        self.seen += 1.0
        if isinstance(window, Absent):
            self.skipped += float(window.is_fault)
            self.left_out += float(window.is_repeated)
            self._absent = window.reason
            return
        self._absent = None
        phase, fresh = int(self.seen) % self.stretches.spread, 1.0 - self._ema
        self.weight = self._ema * self.weight + fresh
        self.token_sum = self._ema * self.token_sum + fresh * window.num_tokens * window.big_noise
        self.rows_sum = self._ema * self.rows_sum + fresh * window.rows_before
        self._note_rows()
        self._noise.update(window.tr_sigma, window.grad_sq, phase)
        self.history.add(window.tr_sigma, window.grad_sq, phase)
        if window.between is not None and window.within is not None:
            self._consistency.update(window.between, window.within, phase)
        self.small_noise, self.big_noise = window.small_noise, window.big_noise
        self.world_size = float(window.world_size)

    def _note_rows(self) -> None:
        # A row stands in the middle of its document, on average. No weight: no window yet.
        self.stretches.rows = 1.0 + 2.0 * self.rows_sum / (self.weight or 1.0)

    @property
    def reason(self) -> str | None:
        """Why `gns/b_simple` is absent; None if it is present."""
        if len(self._noise.pairs) < MIN_PAIRS or not self.big_noise:
            return self._absent or f"{len(self._noise.pairs)} of at least {MIN_PAIRS} windows had an estimate"
        fit = self._noise.fit()
        ratio = fit.ratio()
        if ratio.value is not None:
            return None
        at_least = "" if ratio.low is None else f"; it is at least {ratio.low:.3g} sequences"
        if round(fit.stretches) < MIN_STRETCHES:
            rows, stretches = round(self.stretches.rows), round(fit.stretches)
            if rows == 1:
                return f"{stretches} of at least {MIN_STRETCHES} independent windows are averaged{at_least}"
            text = f"documents have lasted about {rows} rows so far: the steps averaged are"
            return f"{text} {counted(stretches, 'independent stretch')} of at least {MIN_STRETCHES}{at_least}"
        return f"|G|^2 cannot be told from 0 yet: B has no upper bound{at_least}"

    def metrics(self) -> dict[str, float]:
        """The known values by catalog key; those that count do since the start."""
        values: dict[str, float | None] = {"gns/skipped": self.skipped}
        if self.left_out:
            values["gns/left_out"] = self.left_out
        if self.big_noise:
            fit, current = self._noise.fit(), self.history.current()
            values["gns/tr_sigma"], values["gns/grad_sq"] = fit.now.tolist()
            values |= {"gns/b_small": 1.0 / self.small_noise, "gns/b_big": 1.0 / self.big_noise}
            if len(self._consistency.pairs) >= MIN_PAIRS:
                values |= self._consistency_values()
            if len(self._noise.pairs) >= MIN_PAIRS:
                values |= self._values_of_ratio(fit.ratio())
            if current is not None:
                low, high, value, _ = current.ratio
                values |= {"gns/b_now": value, "gns/b_now_low": low, "gns/b_now_high": high}
                values["gns/b_now_steps"] = float(current.steps)
        return {key: value for key, value in values.items() if value is not None}

    def drain_metrics(self) -> dict[str, float]:
        """`metrics` for a logged step, which count since the last drain."""
        values = {**self.metrics(), "gns/skipped": self.skipped - self.drained}
        if self.left_out:
            values["gns/left_out"] = self.left_out - self.drained_left_out
        self.drained, self.drained_left_out = self.skipped, self.left_out
        return values

    def _values_of_ratio(self, ratio: Ratio) -> dict[str, float | None]:
        low, high, value, error = ratio
        values = {"gns/b_simple": value, "gns/b_simple_se": error}
        values |= {"gns/b_simple_low": low, "gns/b_simple_high": high}
        if value is not None:
            per_micro = self.world_size * self.shards_per_rank / self.small_noise  # in sequences
            values |= {"gns/gns_mu": value / per_micro, "gns/Bsimple_from_mu": value}
            if self.token_sum > 0.0:
                values["gns/b_simple_tokens"] = value * self.token_sum / self.weight
            if value > 0.0:
                values["gns/batch_ratio"] = 1.0 / self.big_noise / value
        return values

    def _consistency_values(self) -> dict[str, float]:
        """Between over within, and its error; a ratio above the cap is scaled down to it, with its
        error. The cap if only within vanishes; nothing if the ratio is not known otherwise."""
        fit = self._consistency.fit()
        ratio = fit.ratio()
        if ratio.value is not None and ratio.error is not None:
            shrunk = CONSISTENCY_CAP / max(abs(ratio.value), CONSISTENCY_CAP)
            return {"gns/consistency": shrunk * ratio.value, "gns/consistency_se": shrunk * ratio.error}
        between, within = fit.now.tolist()
        is_vanishing = abs(within) * CONSISTENCY_CAP < between
        if is_vanishing and is_positive(between, float(fit.covariance[0, 0]), fit.freedom):
            return {"gns/consistency": CONSISTENCY_CAP, "gns/consistency_se": 0.0}
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The averages, the history and the gauges as plain floats; taken between windows."""
        return {
            "noise": self._noise.state_dict(),
            "history": self.history.state_dict(),
            "consistency": self._consistency.state_dict(),
            "gauges": {name: float(getattr(self, name)) for name in self.GAUGES},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.history.load_state_dict(state["history"])
        self._noise.load_state_dict(state["noise"])
        self._consistency.load_state_dict(state["consistency"])
        for name in self.GAUGES:
            setattr(self, name, float(state["gauges"][name]))
        self._note_rows()
        self._absent = None
