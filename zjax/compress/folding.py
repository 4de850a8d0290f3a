"""Factors of inputs that go into the norm or the matrix before."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.compress.statistics import Statistics
from zjax.models.block import Block, BlockGroup
from zjax.models.feed_forward import FeedForward
from zjax.models.layers import Attention, Norm
from zjax.models.recording import blocks_in

Arrays = dict[str, jax.Array]
"""Parameters of a block by path."""
_LINEAR_IN_VALUES = ("swiglu", "geglu")
"""Activations whose result is proportional to the values beside the gates."""


@dataclasses.dataclass(frozen=True)
class Fold:
    """A norm or a matrix with outputs that some matrices read, and nothing else.

    Args:
        producer: Path of the norm or of the linear layer.
        consumers: Paths of the linear layers.
        is_norm: Whether the producer is a norm.
        zero_centered: Whether a norm stores factors minus 1.
        heads: Query heads and heads of values, where each of the latter enters the
            consumer several times; (1, 1) otherwise.
    """

    producer: str
    consumers: tuple[str, ...]
    is_norm: bool = False
    zero_centered: bool = False
    heads: tuple[int, int] = (1, 1)

    def shared(self, x: Float[Array, " K"]) -> Float[Array, " K"]:
        """Averages over the inputs that come from one output of the producer."""
        queries, values = self.heads
        grouped = x.reshape(values, queries // values, -1).mean(1, keepdims=True)
        return jnp.repeat(grouped, queries // values, 1).reshape(-1)


def folds_in(block: Block | BlockGroup, *, has_matrices: bool) -> list[Fold]:
    """Lists what can take up factors of inputs; without matrices, norms alone."""
    found = list[Fold]()
    for path, layer in blocks_in(block).items():
        prefix = f"{path}/" if path else ""
        for fold in _folds_of(layer):
            if fold.is_norm or has_matrices:
                named = tuple(f"{prefix}{name}" for name in fold.consumers)
                producer = f"{prefix}{fold.producer}"
                found.append(
                    dataclasses.replace(fold, producer=producer, consumers=named)
                )
    return found


def _folds_of(layer: Block) -> Iterator[Fold]:
    """Yields the folds of one layer."""
    # Elsewhere the stream, which others read, enters the matrices.
    reads_norm = layer.norm_position in ("input", "both")
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, Attention):
        if reads_norm:
            names = ("attention/query", "attention/key", "attention/value")
            yield _of_norm("attention_norm", layer.attention_norm, names)
        heads = attention.num_heads, attention.num_kv_heads
        yield Fold("attention/value", ("attention/out",), heads=heads)
    if isinstance(mlp, FeedForward):
        gate = () if mlp.gate is None else ("mlp/gate",)
        if reads_norm:
            yield _of_norm("mlp_norm", layer.mlp_norm, (*gate, "mlp/up"))
        if mlp.activation in _LINEAR_IN_VALUES:
            yield Fold("mlp/up", ("mlp/down",))


def _of_norm(path: str, norm: Norm, consumers: tuple[str, ...]) -> Fold:
    """Makes the fold of a norm."""
    return Fold(path, consumers, is_norm=True, zero_centered=norm.zero_centered)


def divide_outputs(
    params: Arrays, fold: Fold, factors: Float[Array, " K"], dtype: str
) -> tuple[Arrays, Float[Array, " K"]]:
    """Divides the outputs of a producer by the factors of the inputs.

    The scale of a norm is rounded to the dtype of the files, and the factors follow:
    consumers that are multiplied by the returned factors lose nothing, where a stored
    scale - 1 near -1 has few bits of the scale.

    Args:
        params: Parameters of a block.
        fold: Producer to change.
        factors: Positive factors of the inputs of the consumers, equal for inputs that
            come from one output.
        dtype: Dtype of the norms in the files.

    Returns:
        Changed parameters, float32, and the factors by which the outputs are divided.

    Example:
        >>> fold = Fold("norm", ("up",), is_norm=True, zero_centered=True)
        >>> params = {"norm/scale": jnp.array([0.0])}
        >>> params, by = divide_outputs(params, fold, jnp.array([60.0]), "bfloat16")
        >>> params["norm/scale"].tolist(), by.tolist()
        ([-0.984375], [64.0])
    """
    changed = dict(params)
    if fold.is_norm:
        path = f"{fold.producer}/scale"
        changed[path], factors = _divided_scale(params[path], fold, factors, dtype)
    queries, values = fold.heads
    outputs = factors.reshape(values, queries // values, -1)[:, 0].reshape(-1)
    for name in ("bias",) if fold.is_norm else ("kernel", "bias"):
        path = f"{fold.producer}/{name}"
        if path in params:
            x = params[path].astype(jnp.float32).reshape(-1, outputs.size)
            changed[path] = (x / outputs[None]).reshape(params[path].shape)
    return changed, factors


def _divided_scale(
    scale: Float[Array, "..."], fold: Fold, factors: Float[Array, " K"], dtype: str
) -> tuple[jax.Array, jax.Array]:
    """Divides the scale of a norm; returns the stored scale and the true factors."""
    limits, offset = jnp.finfo(dtype), float(fold.zero_centered)
    before = offset + scale.astype(jnp.float32).reshape(-1)
    # A scale that rounds to 0 would lose the input.
    least = limits.eps if fold.zero_centered else limits.tiny
    size = jnp.clip(jnp.abs(before) / factors, float(least), float(limits.max))
    wanted = jnp.where(before == 0, 0.0, jnp.sign(before) * size)
    stored = (wanted - offset).astype(dtype).astype(jnp.float32)
    divided = jnp.where(before == 0, factors, before / (offset + stored))
    return stored.reshape(scale.shape), divided


def divided(found: Statistics, factors: Float[Array, " K"]) -> Statistics:
    """Returns the statistics of inputs that are divided by factors."""
    return Statistics(
        found.hessian / jnp.outer(factors, factors),
        found.mean / factors,
        found.largest / factors,
        found.num_tokens,
    )
