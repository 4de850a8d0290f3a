"""How the layers of a built-in model follow one another."""

from zjax.config import schema


def repeats_kernels(config: schema.Config) -> bool:
    """Whether layers may not stand side by side in one program.

    XLA makes cuDNN's backward pass of attention deterministic in the first layer of a
    program and does not find the kernel of the others: the program fails as it starts.

    Args:
        config: Read for `deterministic`, `model.attention` and the dtype.

    Returns:
        True for deterministic runs that may take cuDNN's attention.
    """
    may_take_cudnn = (
        config.model.attention in ("auto", "cudnn")
        and config.precision.compute_dtype != "float32"
    )
    return config.deterministic and may_take_cudnn


def layers_per_scan(config: schema.Config) -> int:
    """Layers in one turn of the loop over layers.

    Args:
        config: Checked settings.

    Returns:
        `model.layers_per_scan`, or 1 where that leaves layers side by side and they may
        not be; 0 for no loop, as where blocks are programs of their own.

    Example:
        >>> layers_per_scan(schema.Config())
        0
        >>> layers_per_scan(schema.Config(deterministic=True))
        1
    """
    chosen = config.model.layers_per_scan
    apart = config.zero.optimizer_memory != "device"
    return 1 if not chosen and not apart and repeats_kernels(config) else chosen
