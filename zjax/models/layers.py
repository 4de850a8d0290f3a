"""Layers that name the dims of their parameters and compute in the parameters' dtype.

Kernels keep heads and head channels apart, so that a placement can name either. Norms,
softmax and rotations are float32 inside; the dtype of everything else is that of the
parameters a step passes in.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zjax.config import schema
from zjax.ops import norm, rotary
from zjax.parallel import remat

Dims = tuple[tuple[str | None, int], ...]
"""Logical name and size of each array dim."""
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""`attend(q, k, v) -> (averages, kept)`; kept leaves the block, for caches."""

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


class Linear(nnx.Module):
    """A matrix between groups of dims, with an optional bias.

    Args:
        inputs: The last dims of the input, which are summed over.
        outputs: The dims that replace them.
        std: Standard deviation of the initial kernel.
        use_bias: Whether to add a bias, which starts at zero.
        rngs: Source of the initial values.
    """

    def __init__(
        self,
        inputs: Dims,
        outputs: Dims,
        *,
        std: float = INIT_STD,
        use_bias: bool,
        rngs: nnx.Rngs,
    ):
        self.num_inputs = len(inputs)
        self.kernel = make_param(inputs + outputs, make_normal(rngs.params(), std))
        self.bias = make_param(outputs, jnp.zeros) if use_bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Multiplies the last dims of `x` by the kernel."""
        y = jnp.tensordot(x, self.kernel[...], axes=self.num_inputs)
        if self.bias is None:
            return y
        bias = self.bias[...]
        return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


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
        rngs: Source of the initial values.
    """

    def __init__(self, config: schema.Model, *, out_std: float, rngs: nnx.Rngs):
        embed: Dims = (("embed", config.embed_size),)
        head_dim = ("head_dim", config.embed_size // config.num_heads)
        heads: Dims = (("heads", config.num_heads), head_dim)
        kv_heads: Dims = (("kv_heads", config.num_kv_heads), head_dim)
        bias = config.use_bias
        self.query = Linear(embed, heads, use_bias=bias, rngs=rngs)
        self.key = Linear(embed, kv_heads, use_bias=bias, rngs=rngs)
        self.value = Linear(embed, kv_heads, use_bias=bias, rngs=rngs)
        self.out = Linear(heads, embed, std=out_std, use_bias=bias, rngs=rngs)

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
        return self.out(remat.name_attention(averages)), kept


class FeedForward(nnx.Module):
    """Two matrices with a GELU between them, or three with a gated SiLU.

    GELU is the tanh form of GPT-2 and the original BERT (arXiv:1606.08415); the gated
    form is SwiGLU (arXiv:2002.05202).

    Args:
        config: Shape of the model.
        out_std: Standard deviation of the matrix that writes to the residual stream.
        rngs: Source of the initial values.
    """

    def __init__(self, config: schema.Model, *, out_std: float, rngs: nnx.Rngs):
        embed: Dims = (("embed", config.embed_size),)
        mlp: Dims = (("mlp", config.mlp_size),)
        bias = config.use_bias
        gated = config.activation == "swiglu"
        self.gate = Linear(embed, mlp, use_bias=bias, rngs=rngs) if gated else None
        self.up = Linear(embed, mlp, use_bias=bias, rngs=rngs)
        self.down = Linear(mlp, embed, std=out_std, use_bias=bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
        """Transforms each token."""
        up = remat.name_mlp(self.up(x))
        if self.gate is None:
            return self.down(jax.nn.gelu(up, approximate=True))
        return self.down(jax.nn.silu(remat.name_mlp(self.gate(x))) * up)
