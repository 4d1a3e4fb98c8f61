"""What a profiler's trace says: where the device's time goes, when it is idle, and what the host waits for."""
