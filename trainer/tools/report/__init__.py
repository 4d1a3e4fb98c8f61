"""The report: one self-contained HTML page on runs. Needs plotly (extra `report`), not torch."""
