"""The verbs, and a run's parts outside the core; nothing else in the core names tools or lab."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.training import Parts

VERBS = {
    "init": "trainer.tools.verbs.before_run:init",
    "check": "trainer.tools.verbs.before_run:check",
    "ls": "trainer.tools.verbs.records:ls",
    "doctor": "trainer.tools.verbs.models:doctor",
    "diagnose": "trainer.tools.verbs.records:diagnose",
    "report": "trainer.tools.verbs.records:report",
    "compare": "trainer.tools.verbs.records:compare",
    "sample": "trainer.tools.verbs.models:sample",
    "eval": "trainer.tools.verbs.models:evaluate",
    "export": "trainer.tools.verbs.models:export",
    "data": "trainer.tools.verbs.data:app",
    "config": "trainer.tools.verbs.before_run:config_app",
}
"""In the order of `train --help`: a function, or a typer app where a verb has verbs of its own."""

if TYPE_CHECKING:  # so that the modules are checked against the signatures of `Parts`
    from trainer.lab import models, own_batches, remote
    from trainer.tools import evaluation_sample, services, summary
    from trainer.tools import launcher as launcher
else:

    class _Later:
        """A module that is imported when something of it is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(import_module(self._name), attribute)

    models, own_batches = _Later("trainer.lab.models"), _Later("trainer.lab.own_batches")
    remote, services = _Later("trainer.lab.remote"), _Later("trainer.tools.services")
    evaluation_sample, summary = _Later("trainer.tools.evaluation_sample"), _Later("trainer.tools.summary")
    launcher = _Later("trainer.tools.launcher")  # of `--nproc`


PARTS = Parts(
    extensions={  # checkpoints have their states under these names
        "per_layer": "trainer.lab.extensions:LayerNumbers",
        "ema": "trainer.lab.extensions:AveragedWeights",
        "best": "trainer.lab.extensions:BestCheckpoint",
        "spikes": "trainer.lab.extensions:LossSpikes",
        "sample": "trainer.lab.samples:Samples",
        "profile": "trainer.lab.extensions:StepProfile",
        "progress": "trainer.lab.progress:ProgressBar",
    },
    families={
        "gated_delta": "trainer.lab.gated_delta:build",
        "transformer": "trainer.lab.transformer:build",
        "torch_rnn": "trainer.lab.nested_state:TorchRnn",
        "hugging_face": "trainer.lab.hugging_face:build",
    },
    messages=summary,
    store=remote,
    evaluations=evaluation_sample,
    models=models,
    data=own_batches,
    sinks=services,
)
"""The parts that a run is given."""
