"""Copies of the model that send each other less than their gradients."""
