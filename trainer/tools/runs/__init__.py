"""Run records: the files of a run, read back for diagnosis, reports and comparisons. Without
torch."""
