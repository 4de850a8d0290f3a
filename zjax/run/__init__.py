"""Plans a run, builds the optimizer step from settings, and runs the training loop."""
