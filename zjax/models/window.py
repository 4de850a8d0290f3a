"""The attention window of a step, made once for all blocks."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.config import schema
from zjax.config.step_values import ATTENTION_WINDOW
from zjax.ops import attention, sparse
from zjax.ops.window import Window
from zjax.parallel import sequence, tensor


def make_window(
    config: schema.Model, batch: Mapping[str, Any], x: Float[Array, "B L M"]
) -> Window | None:
    """The window that a batch asks for.

    Args:
        config: Shape of the model.
        batch: Read for `schedule`, and for whether rows have segments or padding.
        x: The stream; read for its length and dtype.

    Returns:
        The window, with the plan of the kernels if they run; None if the batch has no
        window.

    Example:
        >>> make_window(schema.Model(), {}, jnp.zeros((1, 8, 4))) is None
        True
    """
    size = batch.get("schedule", {}).get(ATTENTION_WINDOW)
    if size is None:
        return None
    window, length = Window(size.astype(jnp.int32)), x.shape[1]
    pattern = _pattern(config, x)
    if pattern is None or config.kind == "encoder":
        return window
    make_plan = sparse.WindowPlans(
        pattern,
        sequence.num_kv_heads(config),
        config.head_size,
        segments=not {"segment_ids", "lengths"}.isdisjoint(batch),
    )
    return Window(window.size, None, make_plan).on_tokens(length)


def _pattern(config, x):
    if config.attention == "sparse":
        return sparse.sparse_of(config)
    return attention.window_pattern(
        config.attention,
        x.dtype,
        num_heads=tensor.laid_heads(config.num_heads, config.num_kv_heads)[0],
        head_size=config.head_size,
        length=x.shape[1],
    )
