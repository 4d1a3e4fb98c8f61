"""The critical batch size by branching: short runs from one checkpoint that differ in the batch alone."""
