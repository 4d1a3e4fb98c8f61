"""Runs as they lie on disk, read back: what diagnosis, reports and comparisons start from. Needs no torch."""
