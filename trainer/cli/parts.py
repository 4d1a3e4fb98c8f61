"""The verbs of `train` and the parts of a run that are not in the core; nothing else in the core names tools or lab."""

from __future__ import annotations

from importlib.util import find_spec

from trainer.import_path import Parts

LAB = "trainer.lab"

VERBS = {
    "init": "trainer.tools.verbs.before_run:init",
    "check": "trainer.tools.verbs.before_run:check",
    "preview": "trainer.tools.verbs.before_run:preview",
    "ls": "trainer.tools.verbs.records:ls",
    "mix": "trainer.tools.verbs.mix:mix",
    "doctor": "trainer.tools.verbs.before_run:doctor",
    "diagnose": "trainer.tools.verbs.records:diagnose",
    "report": "trainer.tools.verbs.records:report",
    "compare": "trainer.tools.verbs.compare:compare",
    "cbs": "trainer.tools.verbs.cbs:cbs",
    "replay": "trainer.tools.verbs.replay:replay",
    "bisect": "trainer.tools.verbs.replay:bisect",
    "sample": "trainer.tools.verbs.models:sample",
    "eval": "trainer.tools.verbs.models:evaluate",
    "export": "trainer.tools.verbs.models:export",
    "data": "trainer.tools.verbs.data:app",
    "config": "trainer.tools.verbs.files:config",
    "checkpoint": "trainer.tools.verbs.files:checkpoint",
    "payload": "trainer.tools.verbs.files:payload",
}
"""In the order of `train --help`: a function, or a typer app where a verb has verbs of its own."""

_LAB = {
    # Extensions: checkpoints have their states under these names.
    "carry probe": "carry_probe:StepProbe",
    "gns components": "noise_components:NoiseSources",
    "per_depth": "depth:TrainingDepth",
    "per_layer": "per_layer:LayerNumbers",
    "digests": "digests:Digests",
    "spikes": "spikes:LossSpikes",
    "mix": "mix:Mix",
    "sample": "samples:Samples",
    "profile": "profile:StepProfile",
    "progress": "progress:ProgressBar",
    # Families of models.
    "gated_delta": "flash_linear_attention:build",
    "transformer": "transformer:build",
    "hugging_face": "hugging_face:build",
    # Other parts of a run.
    "batch growth": "batch_growth:BatchGrowth",
    "checkpoints in a store": "remote:find_checkpoint",
    "contract check": "contract_check:check_before_run",
    "cuda graphs": "cuda_graph:make",
    "lines by depth": "depth_curve:lines_of",
    "losses by depth": "depth:Depth",
    "mirror": "mirror",
    "mix changes": "mix:restore",
    "own batches": "own_batches:OwnBatches",
    "sources in a store": "stored",
    "tokenized text": "tokenized",
}


def _parts() -> Parts:
    found = find_spec(LAB)
    if found is None or found.origin is None:  # None: what a deletion leaves of the directory
        return Parts(problem=f"{LAB} is not installed")
    of_lab = {name: f"{LAB}.{path}" for name, path in _LAB.items()}
    return Parts({**of_lab, "verdict": "trainer.tools.verbs.records:LiveVerdict"})


PARTS = _parts()
"""What a run is given."""
