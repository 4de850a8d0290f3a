"""Attention over sequences that the devices of the sequence axis hold in parts.

Everything but attention works on each token alone, so that activations stay where the
batch has them. Attention goes one of three ways, which is said once in the log.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Float, Int, Shaped

from zjax.config import schema
from zjax.config.sequence import length_problems, method_problems, sequence_method
from zjax.errors import ConfigError
from zjax.parallel import remat
from zjax.parallel.ring import ring_attention, zigzag
from zjax.parallel.ulysses import ulysses_attention
from zjax.sharding import mesh as meshes
from zjax.sharding import rules
from zjax.sharding.activations import open_size, pin, pin_tokens, row_axes


def sequence_attention(
    attend: Callable[..., Float[Array, "B L H D"]],
    q: Float[Array, "B L H D"],
    k: Float[Array, "B L K D"],
    v: Float[Array, "B L K D"],
    config: schema.Model,
    *,
    segment_ids: Int[Array, "B L"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B L H D"]:
    """Attention in the way that `config.sequence_attention` and the mesh say.

    Args:
        attend: `attend(q, k, v, segment_ids, lengths)`, over whole sequences; with
            `spread=True` over tokens that stay where they are, if it is sparse.
        q: Queries, their tokens as `arrange` has put them.
        k: Keys.
        v: Values.
        config: Shape of the model, and the way.
        segment_ids: Document of each token.
        lengths: Tokens per row; padding follows.

    Returns:
        One average per query and head: what `attend` returns where the sequence axis of
        the mesh in use has one device, or is split by hand already.

    Raises:
        ConfigError: The heads or the length do not divide.

    Example:
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> sequence_attention(lambda q, *_: q, x, x, x, schema.Model()).shape
        (1, 4, 2, 8)
    """
    if not is_split():
        return attend(q, k, v, segment_ids, lengths)
    _check(config, q.shape[1])
    way = sequence_method(config, **_sizes())
    _say(way, f"{config.num_heads} heads")
    if way == "halo":
        return attend(q, k, v, segment_ids, lengths, spread=True)
    if way == "ulysses":

        def whole(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
            return attend(q, k, v, segment_ids, lengths)

        return ulysses_attention(whole, q, k, v, segment_ids)
    return ring_attention(
        *(remat.mark(x, remat.PROJECTIONS) for x in (q, k, v)),
        causal=config.kind == "decoder",
        segment_ids=segment_ids,
        lengths=lengths,
        implementation="xla" if config.attention == "xla" else "auto",
    )


def is_split() -> bool:
    """Whether the mesh in use splits sequences, and leaves that to the compiler.

    Example:
        >>> is_split()
        False
    """
    return open_size(meshes.SEQUENCE) > 1


def token_order(length: int, config: schema.Model) -> Int[np.ndarray, " L"] | None:
    """The order in which devices hold the tokens of a sequence, if it is not its own.

    Args:
        length: Tokens per sequence.
        config: Shape of the model.

    Returns:
        Positions in the sequence, device after device; None where they are 0, 1, ...

    Raises:
        ConfigError: The length does not divide.

    Example:
        >>> token_order(8, schema.Model()) is None
        True
    """
    if not is_split() or config.kind != "decoder":
        return None
    if sequence_method(config, **_sizes()) != "ring":
        return None
    _check(config, length)
    return zigzag(length, open_size(meshes.SEQUENCE))


def arrange(
    x: Shaped[Array, "B L *dims"], config: schema.Model
) -> Shaped[Array, "B L *dims"]:
    """Puts tokens in the order in which the devices hold them, and pins them there.

    Args:
        x: Anything per token, in the order of the sequence.
        config: Shape of the model.

    Returns:
        The same in the order of `token_order`.
    """
    order = token_order(x.shape[1], config)
    return pin_tokens(x if order is None else _in_order(x, order))


def restore(
    x: Shaped[Array, "B L *dims"], config: schema.Model
) -> Shaped[Array, "B L *dims"]:
    """The inverse of `arrange`.

    Args:
        x: Anything per token.
        config: Shape of the model.

    Returns:
        The same in the order of the sequence.
    """
    order = token_order(x.shape[1], config)
    return x if order is None else _in_order(x, np.argsort(order))


def _in_order(x, order):
    # Each device has all of it, and takes slices: XLA cannot part a gather where other
    # axes are split by hand, and would send the slices one by one.
    whole = rules.entry(row_axes(x.shape[0])), None
    x = pin(x, *whole)
    starts = np.flatnonzero(np.diff(order) != 1) + 1
    runs = (range(run[0], run[-1] + 1) for run in np.split(order, starts))
    pieces = [x[:, run.start : run.stop] for run in runs]
    return pin(jnp.concatenate(pieces, axis=1), *whole)


def _sizes():
    return {axis: open_size(axis) for axis in (meshes.SEQUENCE, meshes.TENSOR)}


def _check(config, length):
    problems = [*method_problems(config, **_sizes())]
    problems = problems or [*length_problems("length", length, config, **_sizes())]
    if problems:
        raise ConfigError(*problems)


def _say(way, heads):
    sizes = " x ".join(f"{axis}={size}" for axis, size in _sizes().items() if size > 1)
    _log(way, f"{heads} over {sizes}")


@functools.cache
def _log(way, reason):
    logging.warning("sequence attention: %s (%s)", way, reason)
