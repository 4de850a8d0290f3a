"""Feed-forward layers, undivided and as a sum of tiles."""

import dataclasses
import functools
import operator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zjax.models import layers
from zjax.ops import activation, invariant_layers, remat
from zjax.ops.remat import materialize_gradient
from zjax.settings import schema


class Bias(nnx.Module):
    """Bias vector, initially 0."""

    def __init__(self, dims: layers.Dims):
        self.bias = layers.make_param(dims, jnp.zeros)

    def __call__(self, x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
        """Adds the bias."""
        # XLA may otherwise compute the gradient twice, for the bias and for `x`.
        return materialize_gradient(x + jnp.broadcast_to(self.bias[...], x.shape))


class FeedForward(nnx.Module):
    """Two matrices around a GELU, or three with a gated SiLU or GELU.

    Args:
        out_std: Standard deviation of the matrix that writes to the residual stream.
        is_tile: Whether the layer is one summand of several, without an output bias.
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        out_std: float,
        matmul_dtype: layers.MatmulDtype = "compute",
        is_tile: bool = False,
        rngs: nnx.Rngs,
    ):
        embed: layers.Dims = (("embed", config.embed_size),)
        mlp: layers.Dims = (("mlp", config.mlp_size),)
        linear = functools.partial(layers.Linear, matmul_dtype=matmul_dtype, rngs=rngs)
        gated, use_bias = config.is_gated, config.use_bias
        self.activation = config.activation
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        self.gate = linear(embed, mlp, use_bias=use_bias) if gated else None
        self.up = linear(embed, mlp, use_bias=use_bias)
        # The sum of tiles has the output bias once.
        ends_with_bias = use_bias and not is_tile
        self.down = linear(mlp, embed, std=out_std, use_bias=ends_with_bias)

    def __call__(
        self,
        x: Float[Array, "B L M"] | layers.Normalized,
        adapter_dropout: layers.AdapterDropout | None = None,
    ) -> Any:
        """Transforms each token; no entry is dropped without `adapter_dropout`."""
        if self.gate is not None and layers.are_joined((self.gate, self.up)):
            hidden = layers.dot_joined(x, self.gate, self.activation)
            return self.down(hidden)
        assert not isinstance(x, layers.Normalized)  # joined kernels alone apply it
        hidden = self.hidden(x, adapter_dropout)
        return self.down(hidden, adapter_dropout=adapter_dropout)

    def hidden(
        self,
        x: Float[Array, "B L M"],
        adapter_dropout: layers.AdapterDropout | None = None,
    ) -> Float[Array, "B L F"]:
        """Returns the hidden channels, which enter the last matrix."""
        if self.gate is None:
            up = self.up(x, remat.MLP, adapter_dropout=adapter_dropout)
            return self._activate(up)
        linears = self.up, self.gate
        up, gate = layers.project(
            x, linears, remat.MLP, adapter_dropout=adapter_dropout
        )
        return self._activate(gate, up)

    def _activate(self, *inputs: Float[Array, "B L F"]) -> Float[Array, "B L F"]:
        """Applies the activation to gate and value, or to one input."""
        if self.invariant:
            return invariant_layers.activate(self.activation, *inputs)
        return (activation.UNGATED | activation.GATED)[self.activation](*inputs)


class TiledFeedForward(nnx.Module):
    """Feed-forward as a sum of narrow feed-forwards with separate parameters.

    Activations are elementwise over hidden channels, hence feed-forwards over groups of
    channels add up to the full layer: memory-centric tiling (arXiv:2104.07857, section
    5.1.3).
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        out_std: float,
        matmul_dtype: layers.MatmulDtype = "compute",
        rngs: nnx.Rngs,
    ):
        size = config.mlp_size // config.mlp_tiles
        narrow = dataclasses.replace(config, mlp_size=size)
        embed: layers.Dims = (("embed", config.embed_size),)

        def make_tile() -> FeedForward:
            return FeedForward(
                narrow,
                out_std=out_std,
                matmul_dtype=matmul_dtype,
                is_tile=True,
                rngs=rngs,
            )

        # Sorted as JAX sorts the keys of a dict: as strings, "10" before "2".
        names = sorted(map(str, range(config.mlp_tiles)))
        self.tiles = nnx.Dict({name: make_tile() for name in names})
        self.down = Bias(embed) if config.use_bias else None

    def __call__(
        self,
        x: Float[Array, "B L M"],
        adapter_dropout: layers.AdapterDropout | None = None,
    ) -> Float[Array, "B L M"]:
        """Transforms each token; no entry is dropped without `adapter_dropout`."""
        parts = (tile(x, adapter_dropout) for tile in self.tiles.values())
        y = functools.reduce(operator.add, parts)
        return y if self.down is None else self.down(y)
