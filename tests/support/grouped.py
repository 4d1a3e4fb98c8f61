"""`run` and `train` as those of `tests.support.runs`, for any number of runs in one group of ranks: one launch per worker."""

from __future__ import annotations

import atexit
from functools import partial

from tests.support import runs
from tests.support.many_runs import Group

_group = Group(4)
atexit.register(_group.__exit__)  # before multiprocessing waits for them
run = _group.run
train = partial(runs.train, by=run)
