"""The reference model, and the protocol that every model must implement."""

from trainer.model.encoder import RecurrentEncoder, build
from trainer.model.protocol import ModelOutput, SequenceModel
from trainer.model.recurrence import linear_scan

__all__ = ["ModelOutput", "RecurrentEncoder", "SequenceModel", "build", "linear_scan"]
