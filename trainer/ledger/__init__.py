"""The ledger: recurrent states per group, kept between steps."""

from trainer.ledger.counters import COUNTER_KEYS, GAUGE_KEYS
from trainer.ledger.eviction import WIPE_MODES, WipeMode
from trainer.ledger.exchange import owner_of, splitmix64
from trainer.ledger.ledger import Ledger, Ownership

__all__ = ["COUNTER_KEYS", "GAUGE_KEYS", "WIPE_MODES", "Ledger", "Ownership", "WipeMode", "owner_of", "splitmix64"]
