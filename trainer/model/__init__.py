"""The protocol that every model must implement, and the families that need no code of the user's."""

from trainer.model.protocol import ModelOutput, SequenceModel

__all__ = ["ModelOutput", "SequenceModel"]
