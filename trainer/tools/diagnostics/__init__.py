"""Rules that find faults of a run in its logged metrics."""
