"""Slow memories: what rests on the host and passes through the devices."""
