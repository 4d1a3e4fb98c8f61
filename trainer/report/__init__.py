"""The report: one self-contained page about a run, or about several. Needs plotly (extra `report`), and no torch."""
