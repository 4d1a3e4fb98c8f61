"""The ledger: recurrent states per group, kept between steps."""

from trainer.ledger.ledger import COUNTER_KEYS as COUNTER_KEYS
from trainer.ledger.ledger import GAUGE_KEYS as GAUGE_KEYS
from trainer.ledger.ledger import Ledger as Ledger
from trainer.options import LedgerOptions as LedgerOptions
