"""Where gradient noise comes from (`gns.components_every`): some steps are run in halves.

The noise scale takes micro-batches for independent. They are not where all rows of one come from
one stream, or where the next one continues its documents. Their gradients are then

    gradient of a row = mean + deviation of its stream + deviation of its group + deviation of its own

with independent deviations of mean 0 (a random-effects model; Searle, Casella and McCulloch 1992,
*Variance Components*). The gradients h of two pieces of a batch, with the share p of each group and
row in their loss, have the expected inner product

    <h_j, h_k> = |mean|^2 + T_stream [same stream] + T_group sum_g p_jg p_kg + T_row sum_i p_ji p_ki,

the last term for j = k alone. A window of pieces gives the square norm of every piece and, from the
norms of the running sum A, its inner products with the pieces before it:
2 <A_(k-1), h_k> = |A_k|^2 - |A_(k-1)|^2 - |h_k|^2. Least squares over windows gives the four
unknowns, whatever the picks were.

Windows that continue the same groups are not independent. How long they do is seen in sums of
random signs, one per group: their products over windows are the autocorrelation of what groups
deviate by. It could go if the noise scale took rows for independent.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.arrays import IGNORED
from trainer.data.batch import MicroBatch
from trainer.metrics.best_effort import SkipBatch
from trainer.metrics.noise_scale import estimate
from trainer.metrics.noise_scale.estimate import Ratio, bounded_ratio
from trainer.training.extension import Extension

if TYPE_CHECKING:
    from trainer.data.layout import Stream
    from trainer.metrics.aggregate import Reported
    from trainer.training.run import Run

Vector = NDArray[np.float64]

# Columns of the design, in the order in which they are kept: one that is a combination of those
# before it is left out, and its part is counted with theirs. So a group that never comes back is
# counted with its rows.
MEAN, STREAM, ROW, GROUP = range(4)
NUM_TERMS = 4
NUM_EQUATIONS = NUM_TERMS * NUM_TERMS + NUM_TERMS
NUM_SIGNS = 64  # fewer leave the autocorrelation of a few long documents too uncertain
NUM_SUMS = NUM_EQUATIONS + NUM_SIGNS
WINDOW_LENGTH = NUM_SUMS + 3  # and |gradient|^2 of the step, its rows, and the coincidence
METRIC_KEYS = (
    *("gns/b_drawn", "gns/b_drawn_low", "gns/b_drawn_high"),
    *("gns/b_independent", "gns/b_independent_low", "gns/b_independent_high"),
    *("gns/noise_from_stream", "gns/noise_from_row", "gns/noise_from_group"),
)
KEPT = 100  # windows
LAGS = 3  # least number of windows after which they count as independent
UNRELATED = 0.2  # autocorrelation of groups up to which they count as new
MIN_GENERATIONS = 6  # sets of groups in the windows, for bounds
MIN_KEPT = 8  # fewer do not give a usable standard error
# Times a group's id: a random sign.
_ODD = np.random.default_rng(0).integers(-(2**63), 2**63, size=NUM_SIGNS) | 1
DEPENDENT = 1e-6  # share of a column unexplained by those before it, below which it is their combination


@dataclass(frozen=True)
class Piece:
    """Rows whose gradient is measured by itself: a micro-batch, or half of one."""

    stream: Hashable  # the source of its rows, which is the same for all
    groups: Sequence[int]  # [b] of the rows, such as their documents; -1: one of its own
    weights: Sequence[float]  # [b] of the rows in the mean loss, such as their tokens


def normal_equations(
    pieces: Sequence[Piece], kappas: Sequence[float], squares: Sequence[float], sums: Sequence[float]
) -> Vector:
    """[NUM_SUMS] a window's least-squares problem and group signs; those of ranks add up.

    Args:
        pieces: K of them, in the order of their backward passes.
        kappas: [K] factor on each one's mean loss in the backward.
        squares: [K] square norm of each one's gradient.
        sums: [K] square norm of the gradient accumulated over this one and those before it.
    """
    matrix, right = np.zeros((NUM_TERMS, NUM_TERMS)), np.zeros(NUM_TERMS)
    shares = [_shares(piece) for piece in pieces]
    for k, (piece, kappa) in enumerate(zip(pieces, kappas, strict=True)):
        if kappa <= 0.0:
            continue
        rows, groups = shares[k]
        weights, is_alone = np.asarray(piece.weights, dtype=np.float64), np.asarray(piece.groups) < 0
        alone = weights[is_alone] / weights.sum()  # rows without a group overlap with themselves
        design = np.array([1.0, 1.0, rows, _overlap(groups, groups) + float(alone @ alone)])
        matrix += np.outer(design, design)
        right += design * (squares[k] / kappa**2)
        before = [kappas[j] for j in range(k)]
        total = sum(before)
        if total <= 0.0:
            continue
        earlier = list(zip(before, pieces, shares, strict=False))
        same = sum(c for c, other, _ in earlier if other.stream == piece.stream)
        overlap = sum(c * _overlap(theirs, groups) for c, _, (_, theirs) in earlier)
        design = np.array([1.0, same / total, 0.0, overlap / total])
        product = 0.5 * (sums[k] - sums[k - 1] - squares[k]) / (kappa * total)
        weight = total / kappa  # about the number of pairs
        matrix += weight * np.outer(design, design)
        right += weight * design * product
    ids = np.array([group for _, groups in shares for group in groups], dtype=np.int64)
    of_pieces = zip(kappas, shares, strict=True)
    sizes = [kappa * size for kappa, (_, groups) in of_pieces for size in groups.values()]
    signs = np.array(sizes, dtype=np.float64) @ np.where(ids[:, None] * _ODD < 0, -1.0, 1.0)
    return np.concatenate([matrix.ravel(), right, signs])


def _shares(piece: Piece) -> tuple[float, Mapping[int, float]]:
    """Sum of the squared shares of the rows, and the share of each group."""
    weights = np.asarray(piece.weights, dtype=np.float64)
    if weights.sum() <= 0.0:
        return 0.0, {}
    weights = weights / weights.sum()
    shares: dict[int, float] = {}
    for group, share in zip(piece.groups, weights.tolist(), strict=True):
        if group >= 0:
            shares[group] = shares.get(group, 0.0) + share
    return float(weights @ weights), shares


def _overlap(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    return sum(share * b[group] for group, share in a.items() if group in b)


@dataclass(frozen=True)
class Components:
    """Where the noise comes from, over the last windows."""

    # The noise scale, in rows, of the batch as it is drawn (its noise over |G|^2, times its rows),
    # and of rows drawn independently. Neither has bounds while groups outlast the windows.
    drawn: Ratio
    independent: Ratio
    shares: Mapping[str, float]  # of a row's noise: "stream", "group", "row", if they can be told apart


class NoiseComponents:
    """The last windows whose pieces were measured."""

    def __init__(self) -> None:
        self._windows: deque[Vector] = deque(maxlen=KEPT)

    def update(self, equations: Sequence[float], grad_sq: float, num_rows: float, coincidence: float) -> None:
        """Add a window: [NUM_SUMS] summed over ranks, the square norm of the mean loss's gradient,
        the effective rows of the step, and `coincidence`: the probability that two rows, drawn
        independently from all data, come from the same stream (the sum of the streams' squared
        shares). Where it is not small, part of what streams deviate by belongs to the mean."""
        window = np.array([*equations, grad_sq, num_rows, coincidence])
        if np.isfinite(window).all():
            self._windows.append(window)

    def components(self, part: slice = slice(None)) -> Components | None:
        """The estimate over the last windows, or a part of them; None for fewer than `MIN_KEPT`, or
        if all micro-batches of each rank's step come from one stream."""
        windows = np.array(list(self._windows)[part])
        count = len(windows)
        if count < MIN_KEPT:
            return None
        matrices = windows[:, : NUM_TERMS**2].reshape(count, NUM_TERMS, NUM_TERMS)
        rights = windows[:, NUM_TERMS**2 : NUM_EQUATIONS]
        grad_sq = windows[:, NUM_SUMS]
        num_rows, coincidence = windows[:, NUM_SUMS + 1 :].mean(axis=0).tolist()
        kept = independent_columns(matrices.sum(axis=0))
        if STREAM not in kept and coincidence < 1.0:
            return None
        inverse = np.linalg.inv(matrices.sum(axis=0)[np.ix_(kept, kept)])
        found = np.zeros(NUM_TERMS)
        found[kept] = inverse @ rights.sum(axis=0)[kept]
        # What each window moves the estimate by: the sandwich estimator, a window as one
        # observation.
        moved = np.zeros((count, NUM_TERMS))
        moved[:, kept] = (rights - matrices @ found)[:, kept] @ inverse
        to_mean = np.array([1.0, coincidence, 0.0, 0.0])
        to_noise = np.array([0.0, 1.0 - coincidence, 1.0, 1.0])
        mean, mean_moved = float(to_mean @ found), moved @ to_mean
        noise, noise_moved = float(to_noise @ found), moved @ to_noise
        big, big_moved = float(grad_sq.mean()), (grad_sq - grad_sq.mean()) / count
        parts = {}
        for k, name in ((STREAM, "stream"), (ROW, "row"), (GROUP, "group")):
            if k in kept and noise > 0.0:
                parts[name] = float(to_noise[k] * found[k] / noise)
        span = lag_of_new_groups(windows[:, NUM_EQUATIONS:NUM_SUMS])
        if count < MIN_GENERATIONS * span:  # what groups deviate by cannot be told from the mean
            return Components(Ratio(None), Ratio(None), parts)
        lags = max(LAGS, 3 * span)
        excess, excess_moved = num_rows * (big - mean), num_rows * (big_moved - mean_moved)
        drawn = _ratio(excess, mean, excess_moved, mean_moved, lags)
        independent = _ratio(noise, mean, noise_moved, mean_moved, lags)
        return Components(drawn, independent, parts)

    def agreed(self) -> Ratio | None:
        """B of the batch as it is drawn, where it has an upper bound. Its lower bound is one that
        both halves of the windows agree on."""
        middle = len(self._windows) // 2
        parts = [self.components(part) for part in (slice(None), slice(middle), slice(middle, None))]
        drawn = [part.drawn for part in parts if part is not None]
        lows = [ratio.low for ratio in drawn if ratio.low is not None]
        if len(lows) < len(parts) or drawn[0].high is None:
            return None
        return drawn[0]._replace(low=min(lows))

    def metrics(self) -> dict[str, float]:
        found = self.components()
        if found is None:
            return {}
        values: dict[str, float | None] = {f"gns/noise_from_{name}": share for name, share in found.shares.items()}
        for key, ratio in (("gns/b_drawn", found.drawn), ("gns/b_independent", found.independent)):
            values |= {key: ratio.value, f"{key}_low": ratio.low, f"{key}_high": ratio.high}
        return {key: value for key, value in values.items() if value is not None}

    def state_dict(self) -> list[list[float]]:
        return [window.tolist() for window in self._windows]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        self._windows = deque(np.array(state, dtype=np.float64).reshape(-1, WINDOW_LENGTH), maxlen=KEPT)


def lag_of_new_groups(signs: Vector) -> int:
    """Windows after which hardly any group is continued. `signs`: [windows, NUM_SIGNS]."""
    count, products = len(signs), signs @ signs.T
    least = UNRELATED * np.trace(products) / count
    lags = (lag for lag in range(count) if not np.trace(products, lag) / (count - lag) > least)
    return next(lags, count)


def _ratio(x: float, y: float, x_moved: Vector, y_moved: Vector, lags: int) -> Ratio:
    """x / y, given what each window moves them by, with the covariance of Newey and West (1987):
    steps that read on in the same documents are not independent of each other. So few degrees of
    freedom are about the quantiles of Kiefer and Vogelsang (2005), which allow for what so many
    lags leave unknown."""
    moved, count = np.stack([x_moved, y_moved]), len(x_moved)
    covariance = moved @ moved.T
    for lag in range(1, lags + 1):
        product = moved[:, lag:] @ moved[:, :-lag].T
        covariance += (1.0 - lag / (lags + 1)) * (product + product.T)
    (var_x, cov), (_, var_y) = (covariance * count / (count - 1)).tolist()
    return bounded_ratio(x, y, var_x, var_y, cov, freedom=max((count - 1.0) / (1 + lags), 2.0))


def independent_columns(matrix: Vector) -> list[int]:
    """Indices of the columns, from the first on, that are no combination of kept ones before them.
    `matrix`: [n, n] Gram matrix of the columns."""
    kept: list[int] = []
    for column, square in enumerate(matrix.diagonal()):
        unexplained = square
        if kept:
            cross = matrix[kept, column]
            unexplained = square - cross @ np.linalg.solve(matrix[np.ix_(kept, kept)], cross)
        if unexplained > DEPENDENT * max(square, 1e-300):
            kept.append(column)
    return kept


class NoiseSources(Extension):
    """Feeds the components of the noise scale. Steps in halves are no windows of its averages."""

    keeps = "pairs"
    num_sums = estimate.NUM_SUMS + NUM_SUMS
    metric_keys = METRIC_KEYS

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.measure_every = run.config.gns.components_every
        self.components = NoiseComponents()
        # Within each source: the probability that two of its rows come from one stream.
        self._concentrations = [_concentration(source.streams) for source in run.plan.sources]
        self._coincidence = 0.0
        self._halves: list[MicroBatch] = []

    def window_read(self, step: int, window: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        batch = (step - 1) * len(window) // len(self.run.reading.loaders)
        shares = self.run.state.dataset.shares_at(step, batch)
        within = zip(shares, self._concentrations, strict=True)
        self._coincidence = sum(share**2 * same for share, same in within)
        self._halves = [half for micro in window for half in halves(micro)]
        return self._halves

    def updated(self) -> Tensor:
        """This rank's sums of the noise scale and `normal_equations`. Waits for the device."""
        gns, norms = self.run.gns, None
        if gns is not None:
            norms = gns.pair_norms()
        if gns is None or norms is None:
            raise SkipBatch("the noise scale did not measure the halves")
        kappas, squares, sums = norms.T.tolist()
        equations = normal_equations([_piece(micro) for micro in self._halves], kappas, squares, sums)
        return torch.cat([gns.local_sums(), torch.from_numpy(equations).to(norms.device)])

    def summed(self, sums: Sequence[float], *, grad_sq: float, grad_factor: float, is_taken: bool) -> None:
        window, equations = sums[: estimate.NUM_SUMS], sums[estimate.NUM_SUMS :]
        if is_taken and window[estimate.FAULTS] == 0.0 and window[estimate.BIG_NOISE] > 0.0:
            num_rows = window[estimate.KAPPA] ** 2 / window[estimate.BIG_NOISE]
            self.components.update(equations, grad_sq / grad_factor**2, num_rows, self._coincidence)
            self._publish_drawn()

    def _publish_drawn(self) -> None:
        # Where it is known, decisions on the batch go by the noise scale of the batch as it is
        # drawn.
        if self.run.gns is not None:
            self.run.gns.drawn = self.components.agreed()

    def drain_metrics(self) -> Mapping[str, Reported]:
        return self.components.metrics()  # the same on all ranks

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self.components.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.components.load_state_dict(state["windows"])
        self._publish_drawn()


def halves(micro: MicroBatch) -> list[MicroBatch]:
    """Both halves of the rows; a single row, and that row with nothing to predict.

    Always two: ranks that exchange states, or synchronize in a forward, must do it equally often.
    """
    middle = len(micro.targets) // 2
    if not middle:  # a single row
        return [micro, micro.masked()]
    return [micro.rows(slice(middle)), micro.rows(slice(middle, None))]


def _piece(micro: MicroBatch) -> Piece:
    labels = micro.extras.get("dataset_labels") or [""]
    located, stream = json.loads(micro.meta), None
    if "segment_ids" in micro.extras:  # rows of all streams, whatever they hold
        labels = [""]
    elif isinstance(located, dict):  # a data set of one's own may say anything
        stream = located.get("stream")
    weights = (micro.targets != IGNORED).sum(dim=1).tolist()
    groups = [-1] * len(weights)
    if micro.carry is not None:
        groups = micro.carry.group_ids.tolist()
        if micro.carry.end_ids is not None:  # a row that begins no group's cell ends with one
            groups = np.where(micro.carry.group_ids >= 0, groups, micro.carry.end_ids).tolist()
    return Piece((*sorted(set(labels)), stream), groups, weights)


def _concentration(streams: Sequence[Stream]) -> float:
    """Probability that two bytes are of one stream: the sum of the files' squared shares."""
    sizes = np.array([os.path.getsize(each.path) for each in streams] or [1], dtype=np.float64)
    shares = sizes / max(sizes.sum(), 1.0)
    return float(shares @ shares)
