"""Whether and how a built-in model loops over its layers."""

from zjax.config import schema


def cannot_unroll(config: schema.Config) -> bool:
    """Whether a program may not contain several layers side by side.

    XLA makes cuDNN's attention backward deterministic in the first layer of a program
    only and finds no kernel for the others, so the program fails to start.
    """
    may_take_cudnn = (
        config.model.attention in ("auto", "cudnn")
        and config.precision.compute_dtype != "float32"
    )
    return config.deterministic and may_take_cudnn


def layers_per_scan(config: schema.Config) -> int:
    """Layers per iteration of the loop over layers; 0 for no loop.

    It is 1 in place of `model.layers_per_scan=0` if layers cannot be unrolled, or have
    loops of their own, for which layers side by side would each keep a copy of their
    weights until the backward pass; unless each block is a program.

    Example:
        >>> layers_per_scan(schema.Config())
        0
        >>> layers_per_scan(schema.Config(deterministic=True))
        1
    """
    chosen = config.model.layers_per_scan
    per_block = config.zero.optimizer_memory != "device"
    loops = cannot_unroll(config) or config.model.mlp_chunk_tokens > 0
    return 1 if not chosen and not per_block and loops else chosen
