"""The loss of pre-training beside the loss of a policy: the ptx term of InstructGPT."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from zjax.rl.masks import masked
from zjax.rl.objective import ObjectiveSums

KEY = "pretraining"
"""Array under `rl` of a batch: weight of each token of pre-training, 0 elsewhere."""


def add_pretraining(
    weight: float,
    sums: ObjectiveSums,
    logprobs: Float[Array, "B L"],
    batch: Mapping[str, Any],
) -> ObjectiveSums:
    """Adds `-weight * mean(log p(x))` over tokens x of pre-training to a policy's loss.

    Over the step, units of pre-training tokens add up to the units of the policy, so
    that the mean over both is half of each: sums count twice. A microbatch of
    pre-training alone has a weight then, and is learned from.

    Args:
        weight: Factor of the mean, above 0.
        sums: Sums of the policy's loss, of the rows of a microbatch.
        logprobs: Log-probability of each target at the temperature 1.
        batch: Arrays of `zjax.rl.pack`, with `pretraining` under `rl`, float32[B, L]:
            units of the policy in the step over the number of pre-training tokens in
            the step, at these tokens, whose `units` are equal. Without a unit of the
            policy, `units` add up to 1 and `pretraining` to 1/2.

    Returns:
        Sums of both losses; `pretraining_loss` in nats per token is among the metrics.

    Reference:
        Ouyang et al., InstructGPT (arXiv:2203.02155), equation 2.
    """
    shares = batch["rl"][KEY]
    losses = (shares * masked(-logprobs, shares > 0)).sum()
    metrics = sums.metrics | {"pretraining_loss": jax.lax.stop_gradient(losses)}
    return ObjectiveSums(
        2 * (sums.loss_sum + weight * losses),
        sums.weight + masked(batch["rl"]["units"], shares > 0).sum(),
        {name: 2 * x for name, x in metrics.items()},
    )
