"""Linen and NNX modules of users as pure functions."""
