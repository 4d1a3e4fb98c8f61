"""Checks that a model keeps the contract of a sequence model with carried state. Needs torch alone,
unless the model declares losses. It could go if only our own models were trained.

from trainer.lab.contracts import check_model

report = check_model(MyModel(vocab_size=257, dim=64), vocab_size=257)
assert not report.breaches, report
"""

from trainer.lab.contracts.check import check_model
from trainer.lab.contracts.trial import CHECKS, ContractError, Report, Verdict

__all__ = ["CHECKS", "ContractError", "Report", "Verdict", "check_model"]
