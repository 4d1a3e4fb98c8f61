"""Where gradient noise comes from, against gradients whose components are known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from trainer.lab.noise_components import NUM_SUMS, NoiseComponents, Piece, normal_equations

DIM = 60
MEAN = np.full(DIM, 0.5)
GRAD_SQ = 0.25 * DIM
T_STREAM, T_GROUP, T_ROW = 12.0, 30.0, 78.0
INDEPENDENT = (T_STREAM + T_GROUP + T_ROW) / GRAD_SQ
WINDOWS = 40
RUNS = 30


@dataclass(frozen=True)
class Layout:
    """How a step is drawn. Rows of a micro-batch are of one stream; each stream has lanes that go on with their groups."""

    world_size: int
    micros: int
    rows: int
    num_streams: int
    ranks_share_streams: bool
    group_cells: int = 4
    pieces: int = 2
    """Of each micro-batch."""


class Draws:
    """Gradients of rows, as a random-effects model says; streams come anew now and then, as in a large corpus."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.rng = np.random.default_rng(seed)
        self.num_groups = 0
        self.streams = [self._new_stream() for _ in range(layout.num_streams)]
        self.lanes: dict[tuple[int, int], list[tuple[int, np.ndarray, int]]] = {}

    def _normal(self, trace: float) -> np.ndarray:
        return self.rng.standard_normal(DIM) * np.sqrt(trace / DIM)

    def _new_stream(self) -> np.ndarray:
        return self._normal(T_STREAM)

    def micro(self, rank: int, stream: int) -> tuple[list[int], np.ndarray]:
        """Group of each row, and the rows' gradients [rows, DIM]."""
        lanes = self.lanes.setdefault((rank, stream), [])
        groups, rows = [], []
        for lane in range(self.layout.rows):
            if lane == len(lanes) or lanes[lane][2] == 0:
                self.num_groups += 1
                fresh = (self.num_groups, self._normal(T_GROUP), self.layout.group_cells)
                lanes[lane : lane + 1] = [fresh]
            group, deviation, left = lanes[lane]
            lanes[lane] = (group, deviation, left - 1)
            groups.append(group)
            rows.append(MEAN + self.streams[stream] + deviation + self._normal(T_ROW))
        return groups, np.array(rows)

    def window(self) -> tuple[np.ndarray, float]:
        """Equations, and |gradient of the step|^2."""
        layout, kappa = self.layout, 1.0 / (self.layout.micros * self.layout.pieces)
        for stream in range(layout.num_streams):  # the corpus is large: what a stream deviates by does not stay
            if self.rng.random() < 0.5:
                self.streams[stream] = self._new_stream()
                for rank in range(layout.world_size):
                    self.lanes.pop((rank, stream), None)
        picks = self.rng.integers(layout.num_streams, size=(layout.micros, layout.world_size))
        if layout.ranks_share_streams:
            picks[:] = picks[:, :1]
        equations, total = np.zeros(NUM_SUMS), np.zeros(DIM)
        for rank in range(layout.world_size):
            pieces, squares, sums, running = [], [], [], np.zeros(DIM)
            for k in range(layout.micros):
                groups, rows = self.micro(rank, int(picks[k, rank]))
                for part in np.array_split(np.arange(layout.rows), layout.pieces):
                    gradient = kappa * rows[part].mean(axis=0)
                    running = running + gradient
                    pieces.append(Piece(int(picks[k, rank]), [groups[i] for i in part], [1.0] * len(part)))
                    squares.append(float(gradient @ gradient))
                    sums.append(float(running @ running))
            equations += normal_equations(pieces, [kappa] * len(pieces), squares, sums)
            total += running / layout.world_size
        return equations, float(total @ total)


LAYOUTS = {
    "per_stream, 2 ranks": Layout(2, 4, 4, 4, ranks_share_streams=True),
    "per_stream, 4 ranks, 2 micro-batches": Layout(4, 2, 8, 4, ranks_share_streams=True),
    "device_per_stream, 2 ranks": Layout(2, 4, 4, 4, ranks_share_streams=False),
    "1 rank": Layout(1, 8, 4, 4, ranks_share_streams=False),
}


@cache
def found_by(layout: Layout, seed: int) -> NoiseComponents:
    draws, components = Draws(layout, seed), NoiseComponents()
    rows = layout.world_size * layout.micros * layout.rows
    for _ in range(WINDOWS):
        equations, square = draws.window()
        components.update(equations.tolist(), square, rows, float(layout.num_streams == 1))
    return components


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_components_are_unbiased_and_the_bounds_cover(name: str) -> None:
    layout = LAYOUTS[name]
    terms, covered = [], 0
    for seed in range(RUNS):
        components = found_by(layout, seed)
        windows = np.array(components.state_dict())
        matrix = windows[:, :16].sum(axis=0).reshape(4, 4)
        terms.append(np.linalg.solve(matrix, windows[:, 16:20].sum(axis=0)))
        found = components.components()
        assert found is not None
        low, high = found.independent.low, found.independent.high
        covered += low is not None and low <= INDEPENDENT and (high is None or high >= INDEPENDENT)
    mean, error = np.mean(terms, axis=0), np.std(terms, axis=0, ddof=1) / np.sqrt(RUNS)
    truth = np.array([GRAD_SQ, T_STREAM, T_ROW, T_GROUP])  # in the order of the columns
    assert (abs(mean - truth) < 5.0 * error).all(), (mean, error)
    assert (error < 0.3 * truth).all(), "the test has no power"
    assert covered / RUNS >= 0.9
    # A ratio of means over all runs, whose bias is that of the estimate.
    assert mean[1:].sum() / mean[0] == pytest.approx(INDEPENDENT, rel=0.05)


@pytest.mark.parametrize("name", ["per_stream, 2 ranks", "1 rank"])
def test_the_batch_as_drawn_has_the_noise_of_its_gradient(name: str) -> None:
    """Against the variance of the step's gradient over thousands of steps."""
    layout = LAYOUTS[name]
    draws = Draws(layout, 1)
    rows = layout.world_size * layout.micros * layout.rows
    squares = [draws.window()[1] for _ in range(1000)]
    truth = rows * (np.mean(squares) - GRAD_SQ) / GRAD_SQ
    found = [found_by(layout, seed).components() for seed in range(RUNS)]
    values = [one.drawn.value for one in found if one is not None and one.drawn.value is not None]
    assert len(values) > 0.9 * RUNS
    assert np.median(values) == pytest.approx(truth, rel=0.1)


def test_decisions_go_by_the_lower_bound_of_both_halves() -> None:
    components = found_by(LAYOUTS["1 rank"], 0)
    middle = WINDOWS // 2
    found = [components.components(part) for part in (slice(middle), slice(middle, None))]
    agreed, lows = (
        components.agreed(),
        [one.drawn.low for one in found if one is not None and one.drawn.low is not None],
    )
    assert agreed is not None
    assert len(lows) == 2
    assert agreed.low == min(lows)
    few = NoiseComponents()
    few.load_state_dict(components.state_dict()[:15])
    assert few.components() is not None
    assert few.agreed() is None


def test_one_stream_per_step_cannot_be_told_from_the_mean() -> None:
    components = found_by(Layout(2, 1, 8, 4, ranks_share_streams=True), 0)
    assert components.components() is None
    assert components.metrics() == {}


def test_a_corpus_of_one_stream_has_no_stream_noise() -> None:
    found = found_by(Layout(1, 4, 4, 1, ranks_share_streams=False), 0).components()
    assert found is not None
    assert set(found.shares) == {"row", "group"}


def test_groups_that_never_come_back_are_counted_with_their_rows() -> None:
    found = found_by(Layout(1, 8, 4, 4, ranks_share_streams=False, group_cells=1), 0).components()
    assert found is not None
    assert set(found.shares) == {"stream", "row"}
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_few_streams_belong_to_the_mean() -> None:
    """Two fixed streams, drawn alike: the gradient of all data is their average, whatever a third one would have been."""
    rng = np.random.default_rng(5)
    streams = rng.standard_normal((2, DIM))
    center, spread = streams.mean(axis=0), streams - streams.mean(axis=0)
    truth = (float((spread**2).sum() / 2) + T_ROW) / float(center @ center)
    values = []
    for _ in range(RUNS):
        components = NoiseComponents()
        for _ in range(WINDOWS):
            picks, pieces, squares, sums, running = rng.integers(2, size=4), [], [], [], np.zeros(DIM)
            for pick in np.repeat(picks, 2):
                rows = streams[pick] + rng.standard_normal((4, DIM)) * np.sqrt(T_ROW / DIM)
                gradient = rows.mean(axis=0) / 8
                running = running + gradient
                pieces.append(Piece(int(pick), [-1] * 4, [1.0] * 4))
                squares.append(float(gradient @ gradient))
                sums.append(float(running @ running))
            equations = normal_equations(pieces, [1 / 8] * 8, squares, sums)
            components.update(equations.tolist(), float(running @ running), 32, 0.5)
        found = components.components()
        assert found is not None
        assert found.independent.value is not None
        values.append(found.independent.value)
    assert np.median(values) == pytest.approx(truth, rel=0.05)


def test_weights_and_empty_pieces_are_heeded() -> None:
    """Uneven weights change the overlap; a masked piece changes nothing."""
    rng = np.random.default_rng(6)
    plain, padded = NoiseComponents(), NoiseComponents()
    for _ in range(WINDOWS):
        pieces, kappas, squares, sums, running = [], [], [], [], np.zeros(DIM)
        for stream in range(4):
            weights = rng.choice([1.0, 5.0], size=4)
            effects = rng.standard_normal((4, DIM)) + MEAN
            gradient = weights @ effects
            running = running + gradient
            pieces.append(Piece(stream, [1, 2, -1, -1], weights.tolist()))
            kappas.append(float(weights.sum()))
            squares.append(float(gradient @ gradient))
            sums.append(float(running @ running))
        total = sum(kappas)
        big = float(running @ running) / total**2
        plain.update(normal_equations(pieces, kappas, squares, sums).tolist(), big, 16, 0.0)
        masked = Piece("none", [-1], [0.0])
        with_masked = normal_equations([*pieces, masked], [*kappas, 0.0], [*squares, 0.0], [*sums, sums[-1]])
        padded.update(with_masked.tolist(), big, 16, 0.0)
    assert plain.metrics() == padded.metrics()


def test_a_window_that_was_not_measured_is_left_out() -> None:
    components = NoiseComponents()
    components.load_state_dict(found_by(LAYOUTS["1 rank"], 0).state_dict())
    before = components.metrics()
    components.update([np.nan] * NUM_SUMS, 1.0, 4, 0.0)
    assert components.metrics() == before
