"""The reference model, and the protocol that every model must implement."""

from trainer.model.encoder import RecurrentEncoder, build
from trainer.model.protocol import ModelOutput, SequenceModel

__all__ = ["ModelOutput", "RecurrentEncoder", "SequenceModel", "build"]
