"""Run records: the files of a run, read back for diagnosis, reports and comparisons. Does not import torch."""
