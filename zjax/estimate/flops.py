"""FLOPs of a run per token, without gradients of frozen weights."""

from zjax.models.flops import CausalAttention, flops_per_token, multiplied_weights
from zjax.settings import schema
from zjax.settings.parameters import is_held_frozen


def run_flops_per_token(
    config: schema.Config, causal_attention: CausalAttention
) -> float:
    """Computes the FLOPs of forward and backward pass of a run, per token."""
    return flops_per_token(
        config.model,
        config.data.length,
        causal_attention=causal_attention,
        per_weight=flops_per_weight(config),
    )


def flops_per_weight(config: schema.Config) -> float:
    """Averages the FLOPs of forward and backward pass per token and matrix weight.

    The product has 2, the gradient of the input 2 and the gradient of the weight 2,
    which frozen weights lack. Adapters are left out.

    Example:
        >>> adapters = None, schema.Lora()
        >>> [flops_per_weight(schema.Config(lora=lora)) for lora in adapters]
        [6.0, 4.0]
    """
    groups, lora = config.optimizer.groups, config.lora
    # Frozen kernels have no weight gradient.
    if lora and not lora.also_train:
        return 4.0
    if not lora and all(group.learning_rate_scale for group in groups):
        return 6.0
    weights = multiplied_weights(config.model)
    trained = (x for path, x in weights.items() if not is_held_frozen(path, config))
    return 4.0 + 2.0 * sum(trained) / sum(weights.values())
