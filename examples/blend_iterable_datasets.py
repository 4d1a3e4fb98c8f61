"""Two PyTorch `IterableDataset`s blended by a schedule: easy examples first, hard ones later.

    python examples/blend_iterable_datasets.py

The source of batch i is a pure function of the seed, the source names and i: it is the same on
every rank and in every run.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainer.data import BlendDataset, BlendSource, ConstantWeight, ScheduledWeight


class Sums(IterableDataset[dict[str, Tensor]]):
    """Infinite rows `a b (a + b)` with a and b below `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.limit)
        while True:
            pair = torch.randint(self.limit, (2,), generator=generator)
            row = torch.cat([pair, pair.sum()[None]])
            yield {"tokens": row[:-1], "targets": row[1:]}


def main() -> None:
    """Blend, and count the batches of each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000)
    options = parser.parse_args()
    # A source is any iterable of micro-batches, so each source's DataLoader does the batching.
    easy, hard = DataLoader(Sums(10), batch_size=4), DataLoader(Sums(1000), batch_size=4)
    # Weights are relative: from 3 to 1 at the start to 1 to 3 at the end, linearly. `unit="step"`
    # would count optimizer steps instead of batches.
    fades = ScheduledWeight("linear", {0: 3.0, options.batches: 1 / 3})
    sources = [BlendSource("easy", easy, fades), BlendSource("hard", hard, ConstantWeight(1.0))]
    blend = BlendDataset(sources, seed=1, per_source=True)

    quarter = max(options.batches // 4, 1)
    for first in range(0, options.batches, quarter):
        batches = itertools.islice(blend, min(quarter, options.batches - first))
        counts = Counter(batch["dataset_labels"][0] for batch in batches)
        print(f"batches from {first}: easy {counts['easy']}, hard {counts['hard']}")
    # By how many batches a source is off; a run logs the largest share as blend/max_share_error.
    batches_off = blend.drain_step_metrics()["blend/share_error/hard"]
    assert isinstance(batches_off, tuple)  # of so many batches: ranks add up both
    print(f"share error: {abs(batches_off[0]) / batches_off[1]:.3f}")


if __name__ == "__main__":
    main()
