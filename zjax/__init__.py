"""zjax."""
