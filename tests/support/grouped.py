"""`run` and `train` as those of `tests.support.runs`, for any number of runs in one group of ranks: one launch per worker.

Each run has its own environment, working directory, command line, output, modules of a test's own, and port. What else a
process keeps (random generators that nobody seeds, caches, threads left behind) stays from run to run: where that matters, and
for runs that are to be killed, see `tests.support.runs.run`.
"""

from __future__ import annotations

import atexit
import subprocess
from functools import partial
from typing import Any

from tests.support import runs
from tests.support.forks import Member, count_launch


class Group:
    """Processes that wait for runs; a run takes the first `nproc` of them. Leaving the context ends them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._members: list[Member] = []

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.end()

    def run(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """As `tests.support.runs.run`. A member that has ended meanwhile is replaced before."""
        alive = [member for member in self._members if member.is_alive]
        if len(alive) < self._size:
            count_launch()
        self._members = alive + [Member() for _ in range(self._size - len(alive))]
        return runs.run(*arguments, group=self._members, **options)


_group = Group(4)
atexit.register(_group.__exit__)  # before multiprocessing waits for them
run = _group.run
train = partial(runs.train, by=run)
