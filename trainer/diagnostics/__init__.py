"""Rules that find faults in the numbers a run has logged."""
