"""Deferred initialization: build a model without its numbers, and make them later, one parameter at a time.

`record` builds a model of `FakeTensor`s and notes each operation on them; the model then goes to the meta device. `replay` runs
the operations on real CPU tensors in the same order, so that torch's global generator gives every parameter the numbers of a
plain construction, and frees each tensor after its last use.

Building under `torch.device("meta")` would not do. Numbers of `torch.tensor([1.0])` would be lost, and what skips its work on
the meta device (`nn.init.trunc_normal_` does) would leave no trace; a fake tensor says that it is on the CPU.

What would not become the same is refused, not guessed. One difference cannot be noticed: `type(p) is nn.Parameter` is False
for a fake parameter (`isinstance` gives True).
"""

from trainer.model.deferred.build import record
from trainer.model.deferred.steps import NotReplayable, Record, replay

__all__ = ["NotReplayable", "Record", "record", "replay"]
