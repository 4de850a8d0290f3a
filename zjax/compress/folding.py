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


def divide_outputs(params: Arrays, fold: Fold, factors: Float[Array, " K"]) -> Arrays:
    """Divides the outputs of a producer by the factors of the inputs.

    Args:
        params: Parameters of a block.
        fold: Producer to change.
        factors: Positive factors of the inputs of the consumers, equal for inputs that
            come from one output.

    Returns:
        Changed parameters.
    """
    queries, values = fold.heads
    factors = factors.reshape(values, queries // values, -1)[:, 0].reshape(-1)
    names = ("scale", "bias") if fold.is_norm else ("kernel", "bias")
    changed = dict(params)
    for name in names:
        path = f"{fold.producer}/{name}"
        if path not in params:
            continue
        x = params[path].astype(jnp.float32)
        if fold.zero_centered and name == "scale":
            x = (1 + x.reshape(-1)) / factors - 1
        else:
            x = x.reshape(-1, factors.size) / factors[None]
        changed[path] = x.reshape(params[path].shape)
    return changed


def divided(found: Statistics, factors: Float[Array, " K"]) -> Statistics:
    """Returns the statistics of inputs that are divided by factors."""
    return Statistics(
        found.hessian / jnp.outer(factors, factors),
        found.mean / factors,
        found.largest / factors,
        found.num_tokens,
    )
