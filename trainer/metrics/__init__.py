"""Metrics: catalog, payload contract, aggregation, tracker and sinks."""
