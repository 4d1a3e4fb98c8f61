"""What the server of `forks` imports: all that a run does."""

import importlib

from trainer.cli.options import uncollected

with uncollected():
    for name in ("torch._dynamo", "trainer.training.main", "trainer.cli.main"):
        importlib.import_module(name)
