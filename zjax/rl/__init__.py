"""Losses of reinforcement learning: small pure functions that compose."""

from zjax.rl.aggregation import (
    LossSum,
    constant_mean,
    example_mean,
    sequence_mean,
    token_mean,
)
from zjax.rl.distillation import forward_kl, jensen_shannon, reverse_kl
from zjax.rl.kto import kto_divergence, kto_loss
from zjax.rl.logprobs import SequenceLogprobs, sequence_logprobs, token_logprobs
from zjax.rl.preferences import (
    Pairs,
    apo_zero_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    log_ratios,
    robust_dpo_loss,
)
from zjax.rl.reference_free import odds_ratio_loss, orpo_loss, simpo_loss
from zjax.rl.reward_model import bradley_terry_loss, ranking_loss

__all__ = [
    "LossSum",
    "Pairs",
    "SequenceLogprobs",
    "apo_zero_loss",
    "bradley_terry_loss",
    "constant_mean",
    "dpo_loss",
    "example_mean",
    "forward_kl",
    "hinge_loss",
    "ipo_loss",
    "jensen_shannon",
    "kto_divergence",
    "kto_loss",
    "log_ratios",
    "odds_ratio_loss",
    "orpo_loss",
    "ranking_loss",
    "reverse_kl",
    "robust_dpo_loss",
    "sequence_logprobs",
    "sequence_mean",
    "simpo_loss",
    "token_logprobs",
    "token_mean",
]
