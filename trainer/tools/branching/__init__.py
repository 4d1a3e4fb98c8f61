"""The critical batch size, by short runs from one checkpoint that differ in the batch alone."""
