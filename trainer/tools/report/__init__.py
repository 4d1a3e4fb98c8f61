"""The report: one self-contained HTML page on one or several runs. Needs plotly (extra `report`), but not torch."""
