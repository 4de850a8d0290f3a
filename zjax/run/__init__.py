"""From settings to a step, and the loop around it."""
