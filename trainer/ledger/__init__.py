"""The ledger: recurrent states per group, kept between steps."""

from trainer.ledger.ledger import COUNTER_KEYS, GAUGE_KEYS, Ledger
from trainer.options import LedgerOptions

__all__ = ["COUNTER_KEYS", "GAUGE_KEYS", "Ledger", "LedgerOptions"]
