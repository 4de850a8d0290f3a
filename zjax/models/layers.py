"""Layers that name the dims of their parameters and compute in the parameters' dtype.

Kernels keep heads and head channels apart, so that a placement can name either. Norms,
softmax and rotations are float32 inside; the dtype of everything else is that of the
parameters a step passes in.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zjax.config import schema
from zjax.ops import float8, rotary
from zjax.ops.materialize import materialize, materialize_gradient
from zjax.parallel import remat, sequence, tensor
from zjax.sharding import mesh as meshes
from zjax.sharding import rules
from zjax.sharding.activations import first_row
from zjax_kernels import norm

Dims = tuple[tuple[str | None, int], ...]
"""Logical name and size of each array dim."""
Lay = Callable[[jax.Array, int], jax.Array]
"""Weights and the dim to be split -> weights as they stand on the devices."""
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
    x: Float[Array, "B L M"], config: schema.Model, key: jax.Array | None
) -> Float[Array, "B L M"]:
    """Zeroes a share of the entries and scales up the rest.

    Each token draws by its place in the microbatch, whatever device holds it.

    Args:
        x: Activations, their tokens as `sequence.arrange` has put them.
        config: Read for `dropout_rate`, the probability of a zero, and for the order.
        key: Random key; None changes nothing, which is evaluation.

    Returns:
        Activations of the same expectation.

    Example:
        >>> dropout(jnp.ones((1, 2, 2)), schema.Model(dropout_rate=0.5), None).tolist()
        [[[1.0, 1.0], [1.0, 1.0]]]

    Reference:
        Srivastava et al. (JMLR 15, 2014).
    """
    share_kept = 1.0 - config.dropout_rate
    if key is None or share_kept == 1.0:
        return x
    num_rows, length, size = x.shape
    rows = first_row(num_rows) + jnp.arange(num_rows)
    order = sequence.token_order(length, config)
    places = jnp.arange(length) if order is None else jnp.asarray(order)

    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def draw(row: jax.Array, place: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, row * length + place)
        return jax.random.bernoulli(own, share_kept, (size,))

    return jnp.where(draw(rows, places), x / share_kept, jnp.zeros_like(x))


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
        self.is_row_split = is_split(inputs[0][0])
        self.is_column_split = is_split(outputs[0][0])
        self.fuse_bias = fuse_bias
        self.matmul_dtype: MatmulDtype = matmul_dtype
        self.kernel = make_param(inputs + outputs, make_normal(rngs.params(), std))
        self.bias = make_param(outputs, jnp.zeros) if use_bias else None

    def __call__(
        self, x: Float[Array, "..."], name: str = "", lay: Lay = tensor.fill_up
    ) -> Float[Array, "..."]:
        """Multiplies the last dims of `x`, whose first is the batch, by the kernel.

        Args:
            x: Activations.
            name: Marks the product, before the bias, for the policies of `remat`.
            lay: Makes rows that devices split stand as `x` does.

        Returns:
            Activations with the dims of the output.
        """
        if self.is_column_split:
            return project(x, (self,), name)[0]
        kernel = self.kernel[...]
        if self.is_row_split:
            kernel = lay(kernel, 0)
            y = tensor.multiply_rows(self.multiply, x, kernel)
        else:
            y = self.multiply(x, kernel)
        return self.finish(y, kernel.shape[self.num_inputs :], name)

    def multiply(self, x: Float[Array, "..."], kernel: Array) -> Float[Array, "..."]:
        """The product with a kernel in place of the own one, its output dims as one."""
        kernel = kernel.reshape(*kernel.shape[: self.num_inputs], -1)
        if self.matmul_dtype == "compute":
            return jnp.tensordot(x, kernel, axes=self.num_inputs)
        num_shares = num_batch_shares(x.shape[0])
        return float8.dot(x, kernel, self.num_inputs, num_batch_shards=num_shares)

    def finish(
        self,
        y: Float[Array, "..."],
        dims: tuple[int, ...],
        name: str,
        lay: Lay = tensor.fill_up,
    ) -> Float[Array, "..."]:
        """Adds the bias to what `multiply` made, and gives the output its dims."""
        # A product can add a bias only where its output dims are one.
        if not self.fuse_bias:
            y = remat.mark(materialize(y), name) if name else materialize(y)
        if self.bias is not None:
            bias = self._columns(self.bias[...], 0, lay)
            bias = bias.reshape(*[1] * (y.ndim - 1), -1)
            y = materialize_gradient(y + bias)
        y = materialize(y) if self.fuse_bias else y
        return y.reshape(*y.shape[:-1], *dims)

    def columns(self, lay: Lay) -> Array:
        """The kernel, with columns as they are to stand on the devices."""
        return self._columns(self.kernel[...], 1, lay)

    def _columns(self, x, dim, lay):
        return lay(x, dim) if self.is_column_split else x


def is_split(name: str | None) -> bool:
    """Whether a dim is split over the tensor axis.

    Args:
        name: Logical name.

    Returns:
        What the table of placements says.

    Example:
        >>> is_split("mlp"), is_split("embed")
        (True, False)
    """
    return name is not None and meshes.TENSOR in rules.RULES[name]


def project(
    x: Float[Array, "B L M"],
    linears: Sequence[Linear],
    name: str = "",
    *,
    lays: Sequence[Lay] | None = None,
) -> list[Float[Array, "..."]]:
    """Multiplies one stream by several matrices that are split by columns.

    Args:
        x: The stream.
        linears: Each with one input dim.
        name: Marks the products, before their biases, for the policies of `remat`.
        lays: Makes the columns of each matrix stand as the devices split them.

    Returns:
        One output per matrix, its first dim filled up with zeros.
    """
    lays = lays or [tensor.fill_up] * len(linears)
    pairs = list(zip(linears, lays, strict=True))
    kernels = [linear.columns(lay) for linear, lay in pairs]
    products = tensor.multiply_columns(
        [linear.multiply for linear in linears],
        x,
        [kernel.reshape(kernel.shape[0], -1) for kernel in kernels],
    )
    return [
        linear.finish(y, kernel.shape[1:], name, lay)
        for (linear, lay), y, kernel in zip(pairs, products, kernels, strict=True)
    ]


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
        # Its compiler splits tokens over devices, which no kernel of one device does.
        how = {"eps": self.eps, "implementation": "reference"}
        if self.kind == "rms_norm":
            return norm.rms_norm(x, scale, **how)
        bias = None if self.bias is None else self.bias[...]
        return norm.layer_norm(x, scale, bias, **how)


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
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
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
        shares = tensor.num_shares()
        heads = tensor.Heads.of(self.num_heads, self.num_kv_heads, shares)
        lays = heads.lay_queries, heads.lay_keys, heads.lay_keys
        q, k, v = project(x, (self.query, self.key, self.value), lays=lays)
        if rotation is not None:
            q, k = rotary.rotate(q, *rotation), rotary.rotate(k, *rotation)
        averages, kept = attend(q, k, v)
        return self.out(averages, lay=heads.lay_queries), kept
