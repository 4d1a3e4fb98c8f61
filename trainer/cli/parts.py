"""The verbs, and a run's parts outside the core; nothing else in the core names tools or lab."""

from __future__ import annotations

from trainer.import_path import Parts

LAB = "trainer.lab"

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
    "config": "trainer.tools.verbs.files:config",
    "checkpoint": "trainer.tools.verbs.files:checkpoint",
    "payload": "trainer.tools.verbs.files:payload",
}
"""In the order of `train --help`: a function, or a typer app where a verb has verbs of its own."""

_TOOLS = {
    "doubts": "trainer.tools.doubts:doubts",
    "rate change": "trainer.tools.doubts:warn_of_rate_change",
    "evaluation on a sample": "trainer.tools.evaluation_sample:draw_sample",
    "first messages": "trainer.tools.summary:announce",
    "lines by depth": "trainer.tools.runs.readings:lines_of",
    "summary": "trainer.tools.summary:summarize",
}
_LAB = {
    # Extensions: checkpoints have their states under these names.
    "per_layer": f"{LAB}.extensions:LayerNumbers",
    "spikes": f"{LAB}.extensions:LossSpikes",
    "sample": f"{LAB}.samples:Samples",
    "profile": f"{LAB}.extensions:StepProfile",
    # Families of models.
    "gated_delta": f"{LAB}.gated_delta:build",
    "transformer": f"{LAB}.transformer:build",
    "torch_rnn": f"{LAB}.nested_state:TorchRnn",
    "hugging_face": f"{LAB}.hugging_face:build",
    # Other parts of a run.
    "checkpoints in a store": f"{LAB}.remote:find_checkpoint",
    "contract check": f"{LAB}.contract_check:check_before_run",
    "cuda graphs": f"{LAB}.cuda_graph:make",
    "initial weights": f"{LAB}.weights:load_weights",
    "loss in chunks": f"{LAB}.pieces:in_chunks",
    "losses by depth": f"{LAB}.depth:Depth",
    "losses of the output": f"{LAB}.auxiliary:make_auxiliary",
    "muon": f"{LAB}.optimizers:build_muon",
    "nested states": f"{LAB}.nested_state:carry_flat",
    "out of memory": f"{LAB}.extensions:explain",
    "own batches": f"{LAB}.own_batches:make",
    "own evaluation": f"{LAB}.own_batches:OwnTask",
    "own optimizer": f"{LAB}.optimizers:build_custom",
    "recomputed blocks": f"{LAB}.pieces:recompute_blocks",
    "tensorboard": f"{LAB}.tensorboard:TensorboardSink",
    "tokenized text": f"{LAB}.tokenized",
    "uploads": f"{LAB}.remote:Uploads",
}


PARTS = Parts(_TOOLS | _LAB)
"""The parts that a run is given."""
