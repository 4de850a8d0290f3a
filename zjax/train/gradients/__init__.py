"""Gradients of the mean loss over a global batch, by each way to make them."""
