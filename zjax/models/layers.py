"""Layers that name the dims of their parameters and compute in the parameters' dtype.

Kernels keep heads and head channels apart, so that a placement can name either. Norms,
softmax and rotations are float32 inside; the dtype of everything else is that of the
parameters a step passes in.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zjax.config import schema
from zjax.ops import float8, norm, rotary
from zjax.ops.storing import store, store_gradient
from zjax.parallel import remat
from zjax.sharding import mesh as meshes

Dims = tuple[tuple[str | None, int], ...]
"""Logical name and size of each array dim."""
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""`attend(q, k, v) -> (averages, kept)`; kept leaves the block, for caches."""

MatmulDtype = Literal["compute", "float8"]
"""Dtype of the operands of a matrix product; `compute` is that of the parameters."""

INIT_STD = 0.02
"""Standard deviation of GPT-2's initial weights."""


def make_param(dims: Dims, initial: Callable[[tuple[int, ...]], Array]) -> nnx.Param:
    """Makes a parameter that knows the logical names of its dims.

    Args:
        dims: Name and size of each dim.
        initial: Shape -> initial value.

    Returns:
        A parameter with metadata `logical`.

    Example:
        >>> make_param((("embed", 2),), jnp.zeros).logical
        ('embed',)
    """
    names, sizes = zip(*dims, strict=True)
    return nnx.Param(initial(sizes), logical=names)


def make_normal(key: jax.Array, std: float) -> Callable[[tuple[int, ...]], Array]:
    """Makes an initialiser of normal float32 values.

    Args:
        key: Random key.
        std: Standard deviation.

    Returns:
        Shape -> values.

    Example:
        >>> make_normal(jax.random.key(0), 0.02)((2, 3)).shape
        (2, 3)
    """
    return lambda shape: std * jax.random.normal(key, shape, jnp.float32)


def dropout(
    x: Float[Array, "*dims"], rate: float, key: jax.Array | None
) -> Float[Array, "*dims"]:
    """Zeroes a share of the entries and scales up the rest.

    Args:
        x: Activations.
        rate: Probability of a zero, 0 to below 1.
        key: Random key; None changes nothing, which is evaluation.

    Returns:
        Activations of the same expectation.

    Example:
        >>> dropout(jnp.ones(4), 0.5, None).tolist()
        [1.0, 1.0, 1.0, 1.0]

    Reference:
        Srivastava et al. (JMLR 15, 2014).
    """
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))


def num_batch_shares(batch_size: int) -> int:
    """Parts in which the devices of the mesh in use hold a batch.

    Args:
        batch_size: Rows of the batch.

    Returns:
        Shares of the mesh set by `jax.set_mesh`, less those already split by hand or
        that do not divide the batch; 1 without a mesh.

    Example:
        >>> num_batch_shares(8)
        1
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in meshes.BATCH_AXES if axis in mesh.auto_axes]
    return math.gcd(batch_size, meshes.num_shares(mesh, axes))


class Linear(nnx.Module):
    """A matrix between groups of dims, with an optional bias.

    Args:
        inputs: The last dims of the input, which are summed over.
        outputs: The dims that replace them.
        std: Standard deviation of the initial kernel.
        use_bias: Whether to add a bias, which starts at zero.
        fuse_bias: Whether the product is to add the bias itself. That pays before a
            kernel that cannot; elsewhere whatever reads the output adds it for nothing.
        matmul_dtype: Dtype in which input and kernel are multiplied.
        rngs: Source of the initial values.
    """

    def __init__(
        self,
        inputs: Dims,
        outputs: Dims,
        *,
        std: float = INIT_STD,
        use_bias: bool,
        fuse_bias: bool = False,
        matmul_dtype: MatmulDtype = "compute",
        rngs: nnx.Rngs,
    ):
        self.num_inputs = len(inputs)
        self.fuse_bias = fuse_bias
        self.matmul_dtype: MatmulDtype = matmul_dtype
        self.kernel = make_param(inputs + outputs, make_normal(rngs.params(), std))
        self.bias = make_param(outputs, jnp.zeros) if use_bias else None

    def __call__(self, x: Float[Array, "..."], name: str = "") -> Float[Array, "..."]:
        """Multiplies the last dims of `x`, whose first is the batch, by the kernel.

        Args:
            x: Activations.
            name: Marks the product, before the bias, for the policies of `remat`.

        Returns:
            Activations with the dims of the output.
        """
        kernel = self.kernel[...]
        inputs = kernel.shape[: self.num_inputs]
        # A product can add a bias only where its output dims are one.
        y = self._multiply(x, kernel.reshape(*inputs, -1))
        if not self.fuse_bias:
            y = remat.mark(store(y), name) if name else store(y)
        if self.bias is not None:
            bias = self.bias[...].reshape(*[1] * (y.ndim - 1), -1)
            y = store_gradient(y + bias)
        y = store(y) if self.fuse_bias else y
        return y.reshape(*y.shape[:-1], *kernel.shape[self.num_inputs :])

    def _multiply(self, x, kernel):
        if self.matmul_dtype == "compute":
            return jnp.tensordot(x, kernel, axes=self.num_inputs)
        num_shares = num_batch_shares(x.shape[0])
        return float8.dot(x, kernel, self.num_inputs, num_shares=num_shares)


class Norm(nnx.Module):
    """The normalisation of `config.norm`, over the width of the model."""

    def __init__(self, config: schema.Model):
        dims: Dims = (("embed", config.embed_size),)
        has_bias = config.norm == "layer_norm" and config.use_bias
        self.kind = config.norm
        self.eps = config.norm_eps
        self.scale = make_param(dims, jnp.ones)
        self.bias = make_param(dims, jnp.zeros) if has_bias else None

    def __call__(self, x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
        """Normalises each token."""
        scale = self.scale[...]
        if self.kind == "rms_norm":
            return norm.rms_norm(x, scale, eps=self.eps)
        bias = None if self.bias is None else self.bias[...]
        return norm.layer_norm(x, scale, bias, eps=self.eps)


class Attention(nnx.Module):
    """Projections to queries, keys and values, and back.

    Args:
        config: Shape of the model.
        out_std: Standard deviation of the matrix that writes to the residual stream.
        matmul_dtype: Dtype in which the projections multiply.
        rngs: Source of the initial values.
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        out_std: float,
        matmul_dtype: MatmulDtype = "compute",
        rngs: nnx.Rngs,
    ):
        embed: Dims = (("embed", config.embed_size),)
        head_dim = ("head_dim", config.embed_size // config.num_heads)
        heads: Dims = (("heads", config.num_heads), head_dim)
        kv_heads: Dims = (("kv_heads", config.num_kv_heads), head_dim)
        linear = functools.partial(
            Linear, use_bias=config.use_bias, matmul_dtype=matmul_dtype, rngs=rngs
        )
        self.query = linear(embed, heads, fuse_bias=True)
        self.key = linear(embed, kv_heads, fuse_bias=True)
        self.value = linear(embed, kv_heads, fuse_bias=True)
        self.out = linear(heads, embed, std=out_std)

    def __call__(
        self,
        x: Float[Array, "B L M"],
        rotation: tuple[Array, Array] | None,
        attend: Attend,
    ) -> tuple[Float[Array, "B L M"], Any]:
        """Projects, rotates, attends and projects back; passes on what attend kept."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if rotation is not None:
            q, k = rotary.rotate(q, *rotation), rotary.rotate(k, *rotation)
        averages, kept = attend(q, k, v)
        return self.out(averages), kept


class Bias(nnx.Module):
    """What is added to every token, from zero on."""

    def __init__(self, dims: Dims):
        self.bias = make_param(dims, jnp.zeros)

    def __call__(self, x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
        """Adds it."""
        return store_gradient(x + jnp.broadcast_to(self.bias[...], x.shape))


class FeedForward(nnx.Module):
    """Two matrices with a GELU between them, or three with a gated SiLU.

    GELU is the tanh form of GPT-2 and the original BERT (arXiv:1606.08415); the gated
    form is SwiGLU (arXiv:2002.05202).

    Args:
        config: Shape of the model.
        out_std: Standard deviation of the matrix that writes to the residual stream.
        matmul_dtype: Dtype in which the matrices are multiplied.
        is_tile: Whether others are added to it, so that it has no bias at its end.
        rngs: Source of the initial values.
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        out_std: float,
        matmul_dtype: MatmulDtype = "compute",
        is_tile: bool = False,
        rngs: nnx.Rngs,
    ):
        embed: Dims = (("embed", config.embed_size),)
        mlp: Dims = (("mlp", config.mlp_size),)
        linear = functools.partial(Linear, matmul_dtype=matmul_dtype, rngs=rngs)
        gated, use_bias = config.activation == "swiglu", config.use_bias
        self.gate = linear(embed, mlp, use_bias=use_bias) if gated else None
        self.up = linear(embed, mlp, use_bias=use_bias)
        ends_with_bias = use_bias and not is_tile
        self.down = linear(mlp, embed, std=out_std, use_bias=ends_with_bias)

    def __call__(self, x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
        """Transforms each token."""
        up = self.up(x, remat.MLP)
        if self.gate is None:
            return self.down(jax.nn.gelu(up, approximate=True))
        gate = self.gate(x, remat.MLP)
        return self.down(jax.nn.silu(gate) * up)


class TiledFeedForward(nnx.Module):
    """A feed-forward as a sum of narrow ones, each with arrays of its own.

    Whatever stands between the matrices works on each hidden channel by itself, so that
    the sum over a part of them is a feed-forward too, and all of them add up to the
    whole: memory-centric tiling (arXiv:2104.07857, section 5.1.3).

    Args:
        config: Shape of the model; `mlp_tiles` are its parts.
        out_std: Standard deviation of the matrices that write to the residual stream.
        matmul_dtype: Dtype in which the matrices are multiplied.
        rngs: Source of the initial values.
    """

    def __init__(
        self,
        config: schema.Model,
        *,
        out_std: float,
        matmul_dtype: MatmulDtype = "compute",
        rngs: nnx.Rngs,
    ):
        size = config.mlp_size // config.mlp_tiles
        narrow = dataclasses.replace(config, mlp_size=size)
        embed: Dims = (("embed", config.embed_size),)

        def make_tile() -> FeedForward:
            return FeedForward(
                narrow,
                out_std=out_std,
                matmul_dtype=matmul_dtype,
                is_tile=True,
                rngs=rngs,
            )

        # In the order in which JAX keeps a dict of them.
        names = sorted(map(str, range(config.mlp_tiles)))
        self.tiles = nnx.Dict({name: make_tile() for name in names})
        self.down = Bias(embed) if config.use_bias else None

    def __call__(self, x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
        """Transforms each token."""
        y = functools.reduce(operator.add, (tile(x) for tile in self.tiles.values()))
        return y if self.down is None else self.down(y)
