"""Multi-head latent attention (MLA), as in DeepSeek-V2 and -V3.

Reference: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zjax.models import layers
from zjax.ops import invariant_layers, remat, rotary
from zjax.parallel import tensor
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import pin
from zjax.typing import Params
from zjax_kernels import abstract

NORM_EPS = 1e-6
"""Term that norms of latents add to the variance, whatever `model.norm_eps` is."""


class LatentAttention(nnx.Module):
    """Projections to latents, on to queries, keys and values, and back.

    Devices of the tensor axis split heads, and each holds the matrices to latents,
    applied to the device's part of the tokens. Values are padded with zeros to the
    channels of keys, so that all kernels and all splits of sequences run.
    """

    def __init__(
        self,
        config: schema.Model,
        latent: schema.Latent,
        *,
        out_std: float,
        matmul_dtype: layers.MatmulDtype = "compute",
        rngs: nnx.Rngs,
    ):
        def heads(size: int) -> layers.Dims:
            return (("heads", config.num_heads), ("head_dim", size))

        def narrow(size: int) -> layers.Dims:
            return ((None, size),)

        def norm(size: int) -> layers.Norm:
            return layers.Norm(config, narrow(size), eps=NORM_EPS)

        embed = (("embed", config.embed_size),)
        key_rank, query_rank = latent.key_rank, latent.query_rank
        linear = functools.partial(
            layers.Linear, use_bias=False, matmul_dtype=matmul_dtype, rngs=rngs
        )
        self.config, self.latent = config, latent
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        self.query_scale = layers.query_scale(config)
        self.query_latent = linear(embed, narrow(query_rank)) if query_rank else None
        self.query_norm = norm(query_rank) if query_rank else None
        inputs = narrow(query_rank) if query_rank else embed
        self.query = linear(inputs, heads(config.head_size))
        self.key_latent = linear(embed, narrow(key_rank + config.rotary.size))
        self.key_norm = norm(key_rank)
        outputs = heads(latent.plain_size + latent.value_size)
        self.key_value: Any = linear(narrow(key_rank), outputs)
        self.to_keys: Any = nnx.data(None)  # [H, P, R], see `absorb`
        self.to_values: Any = nnx.data(None)  # [H, R, V]
        self.out = layers.Linear(
            heads(latent.value_size),
            embed,
            std=out_std,
            use_bias=config.has_output_bias,
            matmul_dtype=matmul_dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "B L M"],
        rotation: tuple[Array, Array] | None,
        attend: layers.Attend,
        adapter_dropout: layers.AdapterDropout | None = None,
    ) -> tuple[Float[Array, "B L M"], Any]:
        """Projects, attends and projects back; returns outputs and cache.

        If `absorb` was called, queries attend to the latents, as one head of keys and
        values.
        """
        assert rotation is not None  # see settings.attention
        config, dropout = self.config, adapter_dropout
        q = self._queries(x, rotation, dropout)
        narrow, turning = self._latents(x, rotation, dropout)
        # The cache holds latents and rotating channels, a fraction of keys and values.
        stored = tensor.join_stream(narrow)[:, :, None]
        stored = jnp.concatenate([stored, turning], axis=-1)
        if self.key_value is None:
            matrices = self.to_keys[...], self.to_values[...]
            return self._attend_to_latents(attend, q, stored, *matrices, dropout)
        if self.invariant and not abstract.is_abstract():
            # As a sampler does: keys of all heads would round in other places.
            matrices = self._split_heads(self._matrix(self.key_value))
            return self._attend_to_latents(attend, q, stored, *matrices, dropout)
        k, v = self._keys_and_values(narrow, turning, dropout)
        v = jnp.pad(v, [*[(0, 0)] * 3, (0, config.head_size - config.value_size)])
        outputs, cache = attend(q, k, v, (stored,))
        outputs = outputs[..., : config.value_size]
        return self.out(outputs, adapter_dropout=dropout), cache

    @property
    def stored_value_size(self) -> int:
        """Channels of a latent: the rotated channels behind are of keys alone."""
        return self.latent.key_rank

    def absorb(self) -> None:
        """Replaces the key-value matrix of an abstract layer by two, of `absorber`."""
        self.key_value = nnx.data(None)
        for name in ("to_keys", "to_values"):
            placeholder = nnx.Param(jax.ShapeDtypeStruct((), jnp.float32))
            setattr(self, name, nnx.data(placeholder))

    def absorber(self) -> Callable[[Params], Params]:
        """Returns the function to the parameters that `absorb` expects.

        The matrices have the dtype of the norm of latents.
        """
        graph, _ = nnx.split(self.key_value)

        def absorb(params: Any) -> Params:
            params = dict(params)
            scale = params["key_norm"]["scale"]
            layer = nnx.merge(graph, params.pop("key_value"))
            matrices = self._split_heads(self._matrix(layer, scale))
            params["to_keys"], params["to_values"] = map(_by_head, matrices)
            return params

        return absorb

    def _matrix(self, layer: Any, scale: Any = None) -> Float[Array, "R H C"]:
        """Returns the matrix behind latents, in the dtype of the norm of latents."""
        scale = self.key_norm.scale[...] if scale is None else scale
        # The layer applied to unit vectors is its matrix, adapters and codes included.
        units = jnp.eye(scale.shape[0], dtype=scale.dtype)[None]
        return layer(units)[0].astype(scale.dtype)

    def _split_heads(
        self, matrix: Float[Array, "R H C"]
    ) -> tuple[Float[Array, "H P R"], Float[Array, "H R V"]]:
        """Returns the matrices by head to keys, which queries absorb, and to values."""
        to_keys, to_values = _split(matrix, self.latent.plain_size)
        return jnp.transpose(to_keys, (1, 2, 0)), jnp.swapaxes(to_values, 0, 1)

    def laid_sinks(self) -> None:
        """Attention sinks, which latents do not have."""

    def _queries(self, x, rotation, dropout):
        """Projects queries, and rotates the last channels of each head."""
        if self.query_latent is not None and self.query_norm is not None:
            narrow = self.query_latent(x, remat.PROJECTIONS, adapter_dropout=dropout)
            x = self.query_norm(narrow)
        q = self.query(x, adapter_dropout=dropout)
        plain, turning = _split(q, self.latent.plain_size)
        q = jnp.concatenate([plain, self._rotate(turning, rotation)], axis=-1)
        return layers.scale_queries(q, self.query_scale, invariant=self.invariant)

    def _latents(self, x, rotation, dropout):
        """Projects latents, and the rotating channels of keys that all heads share."""
        joined = self.key_latent(x, remat.PROJECTIONS, adapter_dropout=dropout)
        narrow, turning = _split(joined, self.latent.key_rank)
        turning = self._rotate(tensor.join_stream(turning)[:, :, None], rotation)
        return self.key_norm(narrow), turning

    def _keys_and_values(self, narrow, turning, dropout):
        """Projects latents to keys and values of all heads."""
        joined = self.key_value(narrow, adapter_dropout=dropout)
        plain, values = _split(joined, self.latent.plain_size)
        turning = jnp.broadcast_to(turning, (*plain.shape[:3], turning.shape[-1]))
        return jnp.concatenate([plain, turning], axis=-1), values

    def _attend_to_latents(self, attend, q, stored, to_keys, to_values, dropout):
        """Attends to latents; queries and outputs absorb the key-value matrix.

        Reference: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
        """
        latent, head_size = self.latent, self.config.head_size
        plain, turning = _split(q, latent.plain_size)
        multiply = _multiply_in_order if self.invariant else _multiply_heads
        q = jnp.concatenate([multiply(plain, to_keys), turning], axis=-1)
        # Attention divides by the root of the latent's channels: scores need the
        # head's.
        factor = (stored.shape[-1] / head_size) ** 0.5
        q = layers.scale_queries(q, factor, invariant=self.invariant)
        outputs, cache = attend(q, stored, stored, (stored,))
        outputs = outputs[..., : latent.key_rank]
        outputs = multiply(outputs, to_values)
        return self.out(outputs, adapter_dropout=dropout), cache

    def _rotate(self, x, rotation):
        """Rotates the channels of heads by position."""
        cos, sin = rotation
        rotate = invariant_layers.rotate if self.invariant else rotary.rotate
        return rotate(x, cos, sin, self.config.rotary.pairs)


def _multiply_heads(
    x: Float[Array, "B L H C"], matrices: Float[Array, "H C D"]
) -> Float[Array, "B L H D"]:
    """Multiplies the values of head h by matrix h."""
    return jnp.einsum("blhc,hcd->blhd", x, matrices)


_multiply_in_order = jax.vmap(
    functools.partial(invariant_layers.dot, alone=False), in_axes=(2, 0), out_axes=2
)
"""Multiplies as `_multiply_heads` does, with sums in one order."""


def _split(x, size):
    return x[..., :size], x[..., size:]


def _by_head(x):
    """Pins a matrix per head to the tensor axis, which the heads divide over."""
    return pin(x, meshes.TENSOR, None, None) if tensor.num_shares() > 1 else x
