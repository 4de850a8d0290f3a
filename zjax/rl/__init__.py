"""Losses of reinforcement learning: small pure functions that compose."""

from zjax.rl.aggregation import LossSum, constant_mean, sequence_mean, token_mean

__all__ = ["LossSum", "constant_mean", "sequence_mean", "token_mean"]
