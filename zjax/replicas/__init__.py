"""Replicas of the model that exchange messages smaller than gradients."""
