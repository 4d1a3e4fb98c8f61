"""Destinations of payloads. Import the sinks from their modules."""
