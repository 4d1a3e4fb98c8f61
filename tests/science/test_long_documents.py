"""The bounds of the noise scale by components, in steps that continue the same documents."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.lab.noise_components import KEPT, NoiseComponents, Piece, normal_equations

DIM, MICROS, ROWS, RUNS = 60, 4, 4, 60
MEAN, T_GROUP, T_ROW = 0.5, 30.0, 78.0
GRAD_SQ = DIM * MEAN**2
INDEPENDENT = (T_GROUP + T_ROW) / GRAD_SQ
SLOW = pytest.param(20, None, marks=pytest.mark.slow)
DRAWN = (MICROS * T_GROUP + T_ROW) / GRAD_SQ  # all micro-batches of a step continue the same documents


def measured(seed: int, length: int) -> NoiseComponents:
    """A full memory of steps, each row reading on in a document of `length` steps that began at a random one."""
    rng, components = np.random.default_rng(seed), NoiseComponents()
    pieces_per_step, half = 2 * MICROS, ROWS // 2
    groups = (np.arange(KEPT)[:, None] + rng.integers(length, size=ROWS)) // length * ROWS + np.arange(ROWS)
    documents = MEAN + rng.standard_normal((groups.max() + 1, DIM)) * (T_GROUP / DIM) ** 0.5
    for own in groups:
        of_rows = rng.standard_normal((MICROS, ROWS, DIM)) * (T_ROW / DIM) ** 0.5 + documents[own]
        gradients = of_rows.reshape(pieces_per_step, half, DIM).mean(axis=1) / pieces_per_step
        sums = (gradients.cumsum(axis=0) ** 2).sum(axis=1).tolist()
        names = own.reshape(2, half).tolist() * MICROS
        pieces = [Piece("stream", each, [1.0] * half) for each in names]
        kappas = [1.0 / pieces_per_step] * pieces_per_step
        equations = normal_equations(pieces, kappas, (gradients**2).sum(axis=1).tolist(), sums)
        components.update(equations.tolist(), sums[-1], MICROS * ROWS, 1.0)
    return components


@pytest.mark.parametrize(("length", "is_shown"), [(12, True), (40, False), SLOW])
def test_bounds_are_right_or_absent_however_long_documents_are(length: int, is_shown: bool | None) -> None:
    lows, highs = [], []
    for seed in range(RUNS):
        found = measured(seed, length).metrics()
        lows.append([found.get(f"gns/b_{name}_low", np.nan) for name in ("independent", "drawn")])
        highs.append([found.get(f"gns/b_{name}_high", np.nan) for name in ("independent", "drawn")])
    truth = np.array([INDEPENDENT, DRAWN])
    assert ((lows > truth).sum(axis=0) <= 0.08 * RUNS).all()  # of which a wrong 5 % would be 3
    assert not (highs < truth).any()
    if is_shown is not None:
        assert (np.isfinite(lows).mean(axis=0) == float(is_shown)).all()
