"""Verbs on a trained model."""
