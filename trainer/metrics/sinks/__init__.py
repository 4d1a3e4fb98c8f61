"""Where payloads go. Import the sinks from their modules."""
