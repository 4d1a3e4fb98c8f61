"""The ledger: recurrent states per group, kept between steps."""

from trainer.ledger.index import WIPE_MODES, WipeMode
from trainer.ledger.ledger import COUNTER_KEYS, GAUGE_KEYS, Ledger, owner_of
from trainer.ledger.snapshot import Owners, Ownership

__all__ = ["COUNTER_KEYS", "GAUGE_KEYS", "WIPE_MODES", "Ledger", "Owners", "Ownership", "WipeMode", "owner_of"]
