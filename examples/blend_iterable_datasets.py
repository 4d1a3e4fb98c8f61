"""Two PyTorch `IterableDataset`s blended by a schedule: easy examples first, hard ones later.

    python examples/blend_iterable_datasets.py

Which source gives batch i is a pure function of the seed, the names and i: every rank chooses the same, and a second
run the same again.
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
    """Rows `a b (a + b)` of numbers below `limit`, for ever."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.limit)
        while True:
            pair = torch.randint(self.limit, (2,), generator=generator)
            row = torch.cat([pair, pair.sum()[None]])
            yield {"tokens": row[:-1], "targets": row[1:]}


def main() -> None:
    """Blend, and count what came from where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000)
    options = parser.parse_args()
    # A source is any iterable of micro-batches; so the batching is the DataLoader's, per source.
    easy, hard = DataLoader(Sums(10), batch_size=4), DataLoader(Sums(1000), batch_size=4)
    # Weights are relative: 3 to 1 at first, 1 to 3 in the end, in a straight line between. `unit="step"` would count
    # optimizer steps instead of batches.
    fades = ScheduledWeight("linear", {0: 3.0, options.batches: 1 / 3})
    sources = [BlendSource("easy", easy, fades), BlendSource("hard", hard, ConstantWeight(1.0))]
    blend = BlendDataset(sources, seed=1, per_source=True)

    quarter = max(options.batches // 4, 1)
    for first in range(0, options.batches, quarter):
        batches = itertools.islice(blend, min(quarter, options.batches - first))
        counts = Counter(batch["dataset_labels"][0] for batch in batches)
        print(f"batches from {first}: easy {counts['easy']}, hard {counts['hard']}")
    # How far the shares are from what the weights said: a run logs it as blend/max_share_error.
    print(f"largest error of a share: {blend.drain_step_metrics()['blend/max_share_error']:.3f}")


if __name__ == "__main__":
    main()
