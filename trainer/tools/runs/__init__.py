"""Run records: the files of a run, read back without torch."""
