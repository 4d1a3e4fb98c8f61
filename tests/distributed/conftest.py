"""Fixtures of these tests."""

from tests.support.grouped import verb

__all__ = ["verb"]
