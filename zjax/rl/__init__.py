"""Reinforcement learning: losses that compose, and the loop that learns by them."""

from zjax.rl.advantages import (
    decoupled_advantages,
    group_advantages,
    rloo_advantages,
    summed,
    total_rewards,
    uniform_groups,
)
from zjax.rl.aggregation import (
    LossSum,
    constant_mean,
    example_mean,
    sequence_mean,
    token_mean,
)
from zjax.rl.corrections import (
    check_correction,
    mask_weights,
    on_policy_sequences,
    sequence_weights,
    token_weights,
    truncate_weights,
)
from zjax.rl.critic import critic_model
from zjax.rl.distillation import forward_kl, jensen_shannon, reverse_kl
from zjax.rl.divergences import kl_k1, kl_k2, kl_k3, kl_k3_k2
from zjax.rl.groups import Experience, Groups, SoftPenalty
from zjax.rl.kto import kto_divergence, kto_loss
from zjax.rl.logprobs import SequenceLogprobs, sequence_logprobs, token_logprobs
from zjax.rl.losses import (
    cispo_loss,
    clip_loss,
    dual_clip_loss,
    reinforce_loss,
    sapo_loss,
)
from zjax.rl.objective import (
    Cispo,
    Clip,
    Correction,
    Kl,
    Objective,
    ObjectiveSums,
    Reinforce,
    Sapo,
    Value,
    objective_sums,
    value_sums,
)
from zjax.rl.packing import Packed, pack
from zjax.rl.policy import logprobs_of, policy_loss, policy_model, values_of
from zjax.rl.preference_model import preference_loss, preference_model
from zjax.rl.preference_trainer import PreferenceTrainer
from zjax.rl.preferences import (
    Pairs,
    apo_zero_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    log_ratios,
    robust_dpo_loss,
)
from zjax.rl.ratios import sequence_ratios, token_ratios
from zjax.rl.reference import Reference
from zjax.rl.reference_free import odds_ratio_loss, orpo_loss, simpo_loss
from zjax.rl.returns import discounted_returns, gae, token_rewards, whiten
from zjax.rl.reward_model import bradley_terry_loss, ranking_loss
from zjax.rl.reward_run import RewardRun
from zjax.rl.rewards import RewardPool, Scorer, add_scores, function_name
from zjax.rl.rollouts import (
    Rollout,
    read_rollouts,
    sampling_problems,
    write_rollouts,
)
from zjax.rl.trainer import Trainer
from zjax.rl.value_loss import value_loss

__all__ = [
    "Cispo",
    "Clip",
    "Correction",
    "Experience",
    "Groups",
    "Kl",
    "LossSum",
    "Objective",
    "ObjectiveSums",
    "Packed",
    "Pairs",
    "PreferenceTrainer",
    "Reference",
    "Reinforce",
    "RewardPool",
    "RewardRun",
    "Rollout",
    "Sapo",
    "Scorer",
    "SequenceLogprobs",
    "SoftPenalty",
    "Trainer",
    "Value",
    "add_scores",
    "apo_zero_loss",
    "bradley_terry_loss",
    "check_correction",
    "cispo_loss",
    "clip_loss",
    "constant_mean",
    "critic_model",
    "decoupled_advantages",
    "discounted_returns",
    "dpo_loss",
    "dual_clip_loss",
    "example_mean",
    "forward_kl",
    "function_name",
    "gae",
    "group_advantages",
    "hinge_loss",
    "ipo_loss",
    "jensen_shannon",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_k2",
    "kto_divergence",
    "kto_loss",
    "log_ratios",
    "logprobs_of",
    "mask_weights",
    "objective_sums",
    "odds_ratio_loss",
    "on_policy_sequences",
    "orpo_loss",
    "pack",
    "policy_loss",
    "policy_model",
    "preference_loss",
    "preference_model",
    "ranking_loss",
    "read_rollouts",
    "reinforce_loss",
    "reverse_kl",
    "rloo_advantages",
    "robust_dpo_loss",
    "sampling_problems",
    "sapo_loss",
    "sequence_logprobs",
    "sequence_mean",
    "sequence_ratios",
    "sequence_weights",
    "simpo_loss",
    "summed",
    "token_logprobs",
    "token_mean",
    "token_ratios",
    "token_rewards",
    "token_weights",
    "total_rewards",
    "truncate_weights",
    "uniform_groups",
    "value_loss",
    "value_sums",
    "values_of",
    "whiten",
    "write_rollouts",
]
