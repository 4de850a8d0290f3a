"""Layers of the built-in models, with logical names for the dims of parameters.

Layers compute in the dtype of the parameters; norms, softmax and rotations in float32.
Kernels have separate dims for heads and head channels, so that sharding can name
either.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zjax.models.projections import Projections
from zjax.ops import invariant as arithmetic
from zjax.ops import invariant_layers, matmul, remat, rotary, rounding
from zjax.ops.keys import fold_name
from zjax.ops.narrow import Codes, WeightDtype, quantize
from zjax.ops.remat import materialize, materialize_gradient
from zjax.ops.rotary import score_factor
from zjax.parallel import sequence, tensor
from zjax.settings import schema
from zjax.settings.quantize import Rule
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import first_row
from zjax_kernels import norm

Dims = tuple[tuple[str | None, int], ...]
"""Logical name and size of each array dim."""
Arrange = Callable[[jax.Array, int], jax.Array]
"""Function `(weights, dim)` that pads or reorders a sharded dim, so that devices get
equal shards."""
Stored = tuple[jax.Array, ...]
"""Cached arrays of tokens, [B, L, heads, channels] each: keys first, values last, or
one array for both."""
Attend = Callable[[Any, Any, Any, Stored], tuple[jax.Array, Any]]
"""`attend(q, k, v, stored) -> (outputs, cache)`; `q` may be `Projections` of all, if
`Attention.defers`."""

MatmulDtype = Literal["compute", "float8"]
"""Dtype of the operands of a matrix product; `compute` is the parameters' dtype."""

INIT_STD = 0.02
"""Standard deviation of GPT-2's initial weights."""


def make_param(dims: Dims, initial: Callable[[tuple[int, ...]], Array]) -> nnx.Param:
    """Makes a parameter with the logical names of the dims as metadata `logical`."""
    names, sizes = zip(*dims, strict=True)
    return nnx.Param(initial(sizes), logical=names)


def make_normal(key: jax.Array, std: float) -> Callable[[tuple[int, ...]], Array]:
    """Returns an initialiser of normal float32 values with standard deviation `std`."""
    return lambda shape: std * jax.random.normal(key, shape, jnp.float32)


def dropout(
    x: Float[Array, "B L M"],
    config: schema.Model,
    key: jax.Array | None,
    rate: float | None = None,
) -> Float[Array, "B L M"]:
    """Zeroes random entries, and scales up all kept entries; no key drops nothing.

    Each token draws by position in the microbatch, on any mesh; `x` is in the token
    order of `sequence.arrange`. A rate of None is `config.dropout_rate`.

    Reference:
        Srivastava et al. (JMLR 15, 2014).
    """
    keep_probability = 1.0 - (config.dropout_rate if rate is None else rate)
    if key is None or keep_probability == 1.0:
        return x
    num_rows, length, size = x.shape
    # Draws by place in the microbatch, not in the shard: equal on all meshes.
    rows = first_row(num_rows) + jnp.arange(num_rows)
    order = sequence.token_order(length, config)
    positions = jnp.arange(length) if order is None else jnp.asarray(order)

    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def draw(row: jax.Array, position: jax.Array) -> jax.Array:
        token_key = jax.random.fold_in(key, row * length + position)
        return jax.random.bernoulli(token_key, keep_probability, (size,))

    return jnp.where(draw(rows, positions), x / keep_probability, jnp.zeros_like(x))


class AdapterDropout(NamedTuple):
    """Dropout of the inputs of adapters alone, as `lora.dropout` asks."""

    key: jax.Array
    config: schema.Model

    def __call__(
        self, x: Float[Array, "B L ..."], path: str, rate: float
    ) -> Float[Array, "B L ..."]:
        """Returns the input of the adapter at `path` with random entries dropped."""
        if not rate:
            return x
        key = fold_name(self.key, path)
        # All dims of a token draw as one.
        flat = x.reshape(*x.shape[:2], -1)
        return dropout(flat, self.config, key, rate).reshape(x.shape)


class Normalized(NamedTuple):
    """A stream with the RMS norm that the next product applies."""

    x: Float[Array, "B L M"]
    scale: Array
    eps: float

    def apply(self) -> Float[Array, "B L M"]:
        """Applies the norm, where the next product does not."""
        shape, how = self.x.shape, {"eps": self.eps, "implementation": "reference"}
        rows = self.x.reshape(-1, shape[-1])
        return norm.rms_norm(rows, self.scale.reshape(-1), **how).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product that is computed when it is added to the stream, in one kernel."""

    x: Array
    kernel: Array | Codes
    num_inputs: int

    def __radd__(self, stream: Array) -> Array:
        """Adds the product to the stream."""
        return matmul.dot_few_rows(
            self.x, self.kernel, self.num_inputs, residual=stream
        )


def num_batch_shards(batch_size: int) -> int:
    """Counts the shards of a batch over the Auto axes of the mesh in use."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in meshes.BATCH_AXES if axis in mesh.auto_axes]
    return math.gcd(batch_size, meshes.num_shares(mesh, axes))


class Linear(nnx.Module):
    """Matrix between groups of dims, with an optional bias.

    Args:
        inputs: Contracted last dims of the input.
        outputs: Dims that replace `inputs`.
        use_bias: Whether to add a bias, initially 0.
        fuse_bias: Whether the product adds the bias, which pays if the next kernel
            cannot.
        matmul_dtype: Dtype of the operands of the product.
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
        self.num_inputs, self.num_outputs = len(inputs), len(outputs)
        self.output_sizes = tuple(size for _, size in outputs)
        self.is_row_sharded = is_tensor_sharded(inputs[0][0])
        self.is_column_sharded = is_tensor_sharded(outputs[0][0])
        self.fuse_bias = fuse_bias
        self.matmul_dtype: MatmulDtype = matmul_dtype
        # None where another layer holds the kernel, see `join`.
        normal = make_normal(rngs.params(), std)
        self.kernel: Any = make_param(inputs + outputs, normal)
        self.bias = make_param(outputs, jnp.zeros) if use_bias else None
        self.joined: Any = nnx.data(None)  # kernels or codes, see `join`
        self.joined_bias: Any = nnx.data(None)  # see `join_biases`
        self.streams = False
        """Whether few rows meet the kernel, as in the decoding of text."""
        self.defers = False
        """Whether the caller adds a `Product` to the stream."""
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        self.rounding: Rule | None = None
        """Codes to whose values kernel and inputs are rounded, see `rounded`."""
        self.on_input: Callable[[Any], None] | None = None
        """Function that records what enters the product; None for none."""
        self.lora: Any = nnx.data(None)  # an adapter of `zjax.models.lora`, if any
        # Of codes in `kernel` (`zjax.models.qlora`), or in `joined`.
        self.scales: Any = nnx.data(None)

    def __call__(
        self,
        x: Float[Array, "..."],
        name: str = "",
        arrange: Arrange = tensor.fill_up,
        adapter_dropout: AdapterDropout | None = None,
    ) -> Any:
        """Multiplies the last dims of `x`; policies save the product by `name`."""
        if self.defers:
            return Product(x, self.streamed(), self.num_inputs)
        if self.joined is not None or self.is_row_sharded:
            # Devices see a part of the channels of a row-sharded layer.
            x = self._rounded_rows(x)
        if self.joined is not None:
            y = matmul.dot_few_rows(x, self.streamed(), self.num_inputs)
            return self.finish(y, self.output_sizes, name)
        if self.is_column_sharded:
            return project(x, (self,), name, adapter_dropout=adapter_dropout)[0]
        matrix = self.matrix(arrange)
        multiply = functools.partial(self.multiply, adapter_dropout=adapter_dropout)
        if self.is_row_sharded:
            y = tensor.multiply_rows(multiply, x, matrix)
        else:
            y = multiply(x, *matrix)
        return self.finish(y, self.output_sizes, name)

    def streamed(self) -> Array | Codes:
        """Returns the matrix that few rows meet: joined, of codes, or the kernel."""
        if self.joined is None:
            return self.kernel[...]
        if self.scales is None:
            return self.joined[...]
        return Codes(self.joined[...], self.scales[...])

    def multiply(
        self,
        x: Float[Array, "..."],
        kernel: Array,
        *factors: Array,
        adapter_dropout: AdapterDropout | None = None,
    ) -> Float[Array, "..."]:
        """Multiplies by a kernel or a shard, and an adapter; merges output dims."""
        y: Any
        if not self.is_row_sharded:
            x = self._rounded_rows(x)
        if self.on_input is not None:
            self.on_input(x)
        kernel = kernel.reshape(*kernel.shape[: self.num_inputs], -1)
        if self.scales is not None:
            scales = self.scales[...]
            scales = scales.reshape(*scales.shape[: self.num_inputs], -1)
            y = rounding.multiply_blocks(x, kernel, scales, self.num_inputs)
        elif self.invariant:
            y = invariant_layers.dot(x, kernel, self.num_inputs)
        elif self.streams:
            y = matmul.dot_few_rows(x, kernel, self.num_inputs)
        elif self.matmul_dtype == "compute":
            y = jnp.tensordot(x, kernel, axes=self.num_inputs)
        else:
            # float8 scales are per shard, which needs no reduction over devices.
            num_shards = num_batch_shards(x.shape[0])
            y = matmul.dot(x, kernel, self.num_inputs, num_batch_shards=num_shards)
        if not factors:
            return y
        how = {"adapter_dropout": adapter_dropout, "invariant": self.invariant}
        return self.lora.add_product(y, x, *factors, **how)

    def finish(
        self,
        y: Float[Array, "..."],
        dims: tuple[int, ...],
        name: str,
        arrange: Arrange = tensor.fill_up,
    ) -> Float[Array, "..."]:
        """Applies DoRA's gain and the bias to a product; restores output dims."""
        if self.lora is not None and self.lora.settings.form == "dora":
            gain = self._columns(self.lora.gain(self.kernel[...]), 0, arrange)
            y *= gain.reshape(*[1] * (y.ndim - 1), -1).astype(y.dtype)
        # XLA fuses a bias into a product only while the output dims are merged.
        if not self.fuse_bias:
            y = remat.mark(materialize(y), name) if name else materialize(y)
        if self.bias is not None:
            bias = self._columns(self.bias[...], 0, arrange)
            bias = bias.reshape(*[1] * (y.ndim - 1), -1)
            y = materialize_gradient(adder(invariant=self.invariant)(y, bias))
        y = materialize(y) if self.fuse_bias else y
        return y.reshape(*y.shape[:-1], *dims)

    def matrix(self, arrange: Arrange) -> tuple[Array, ...]:
        """Returns kernel and adapter factors, with arranged rows or columns."""
        kernel = self.rounded(self.kernel[...])
        matrix = (kernel, *(() if self.lora is None else self.lora.factors))
        dims = (None, None, None)
        if self.is_column_sharded:
            # An adapter is split like the kernel: columns of `b`, or rows of `a`.
            dims = (1, None, 1)
        elif self.is_row_sharded:
            dims = (0, 0, None)
        return tuple(
            x if dim is None else arrange(x, dim)
            for x, dim in zip(matrix, dims, strict=False)
        )

    def rounded(self, kernel: Array) -> Array:
        """Rounds a kernel to the values of its codes, if the layer has a rule."""
        if self.rounding is None:
            return kernel
        return rounding.rounded_kernel(kernel, self.rounding, self.num_outputs)

    def _rounded_rows(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Rounds the inputs of the layer by token, if the layer has a rule."""
        if self.rounding is None:
            return x
        return rounding.rounded_rows(x, self.rounding.activations, self.num_inputs)

    def _columns(self, x, dim, arrange):
        return arrange(x, dim) if self.is_column_sharded else x


def adder(*, invariant: bool) -> Callable[[Any, Any], Any]:
    """Returns the function that adds two arrays in the dtype of both."""
    return arithmetic.add if invariant else operator.add


def is_tensor_sharded(name: str | None) -> bool:
    """Whether a dim of the logical name `name` is sharded over the tensor axis."""
    return name is not None and meshes.TENSOR in meshes.RULES[name]


def project(
    x: Float[Array, "B L M"] | Normalized,
    linears: Sequence[Linear],
    name: str = "",
    *,
    arrangements: Sequence[Arrange] | None = None,
    adapter_dropout: AdapterDropout | None = None,
) -> list[Float[Array, "..."]]:
    """Multiplies one stream by column-sharded matrices; pads the first output dims."""
    if are_joined(linears):
        return _project_joined(x, linears)
    assert not isinstance(x, Normalized)  # joined kernels alone apply a norm
    if linears[0].joined is not None:
        return [linear(x, name) for linear in linears]
    arrangements = arrangements or [tensor.fill_up] * len(linears)
    pairs = list(zip(linears, arrangements, strict=True))
    matrices = [linear.matrix(arrange) for linear, arrange in pairs]
    products = tensor.multiply_columns(
        [
            functools.partial(linear.multiply, adapter_dropout=adapter_dropout)
            for linear in linears
        ],
        x,
        [tuple(x.reshape(x.shape[0], -1) for x in matrix) for matrix in matrices],
    )
    return [
        linear.finish(y, kernel.shape[1:], name, arrange)
        for (linear, arrange), y, (kernel, *_) in zip(
            pairs, products, matrices, strict=True
        )
    ]


def join(linears: Sequence[Linear], weight_dtype: WeightDtype = "compute") -> None:
    """Gives abstract layers that read one stream one matrix, of `join_kernels`."""

    # Placeholders: parameters come when the module is made from its form.
    def placeholder() -> Any:
        return nnx.data(nnx.Param(jax.ShapeDtypeStruct((), jnp.float32)))

    linears[0].joined = placeholder()
    if weight_dtype != "compute":
        linears[0].scales = placeholder()
    for linear in linears:
        linear.kernel = nnx.data(None)


def join_biases(linears: Sequence[Linear]) -> None:
    """Gives abstract layers, which all have a bias or none, one bias side by side."""
    if linears[0].bias is None:
        return
    bias = nnx.Param(jax.ShapeDtypeStruct((), jnp.float32))
    linears[0].joined_bias = nnx.data(bias)
    for linear in linears:
        linear.bias = nnx.data(None)


def are_joined(linears: Sequence[Linear]) -> bool:
    """Whether the first of some layers holds the kernels of all."""
    first, *others = linears
    return first.joined is not None and all(x.joined is None for x in others)


def join_kernels(
    kernels: Sequence[Array], num_inputs: int, weight_dtype: WeightDtype = "compute"
) -> dict[str, Array]:
    """Puts the columns of kernels side by side: one product is faster than several.

    Returns the parameters of the layer that holds them: a matrix, or codes and scales.
    """
    merged = [x.reshape(math.prod(x.shape[:num_inputs]), -1) for x in kernels]
    matrix = jnp.concatenate(merged, axis=1)
    if weight_dtype == "compute":
        return {"joined": matrix}
    found = quantize(matrix, weight_dtype)
    return {"joined": found.codes, "scales": found.scales}


def _project_joined(x, linears):
    """Multiplies a stream by joined kernels, and shares out the columns."""
    y, bias = dot_joined(x, linears[0]), linears[0].joined_bias
    return split_joined(y if bias is None else y + bias[...][None, None], linears)


def split_joined(
    y: Float[Array, "B L N"], linears: Sequence[Linear]
) -> list[Float[Array, "B L ..."]]:
    """Shares out the columns of a product with joined kernels."""
    ends = [*itertools.accumulate(math.prod(each.output_sizes) for each in linears)]
    pairs = zip(linears, jnp.split(y, ends[:-1], axis=-1), strict=True)
    return [linear.finish(y, linear.output_sizes, "") for linear, y in pairs]


def dot_joined(
    x: Float[Array, "B L M"] | Normalized, linear: Linear, activation: str = ""
) -> Float[Array, "B L N"]:
    """Multiplies a stream by the joined kernels that `linear` holds."""
    norm = (x.scale, x.eps) if isinstance(x, Normalized) else None
    rows = x.x if isinstance(x, Normalized) else x
    matrix = linear.streamed()
    return matmul.dot_few_rows(rows, matrix, norm=norm, activation=activation)


class Norm(nnx.Module):
    """Normalisation of `config.norm`, over the last dims of a token.

    Args:
        dims: Dims that are normalised together; None for the width of the model.
        eps: Term added to the variance; None for `config.norm_eps`.
    """

    def __init__(
        self,
        config: schema.Model,
        dims: Dims | None = None,
        *,
        eps: float | None = None,
    ):
        dims = dims or (("embed", config.embed_size),)
        has_bias = config.norm == "layer_norm" and config.use_bias
        self.kind = config.norm
        self.eps = config.norm_eps if eps is None else eps
        self.zero_centered = config.zero_centered_norm
        self.defers = False
        """Whether the next product applies the norm."""
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        self.scale = make_param(dims, jnp.zeros if self.zero_centered else jnp.ones)
        self.bias = make_param(dims, jnp.zeros) if has_bias else None

    def factors(self) -> Float[Array, "..."]:
        """Returns the factors of normalised values."""
        scale = self.scale[...]
        # In bfloat16, 1 + a small scale would round to 1.
        return 1.0 + scale.astype(jnp.float32) if self.zero_centered else scale

    def __call__(self, x: Float[Array, "B L *N"]) -> Any:
        """Normalises the last dims of each token."""
        scale = self.factors()
        if self.defers:
            return Normalized(x, scale, self.eps)
        shape, num_dims = x.shape, scale.ndim
        x = x.reshape(*shape[: x.ndim - num_dims], -1)
        if self.invariant:
            return self._normalize_alone(x).reshape(shape)
        # The compiler shards the tokens, which a kernel for one device does not.
        how = {"eps": self.eps, "implementation": "reference"}
        if self.kind == "rms_norm":
            return norm.rms_norm(x, scale.reshape(-1), **how).reshape(shape)
        bias = None if self.bias is None else self.bias[...].reshape(-1)
        return norm.layer_norm(x, scale.reshape(-1), bias, **how).reshape(shape)

    def _normalize_alone(self, x: jax.Array) -> jax.Array:
        """Normalises the last dim in one order of sums."""
        bias = None if self.bias is None else self.bias[...].reshape(-1)
        how = {"eps": self.eps, "centre": self.kind == "layer_norm"}
        return invariant_layers.normalize(x, self.factors().reshape(-1), bias, **how)


def query_scale(config: schema.Model) -> float:
    """Factor of queries besides the division of scores by the root of `head_size`."""
    root = (config.head_size / config.query_scale_size) ** 0.5
    return root * score_factor(config.rotary.scaling)


def scale_queries(
    q: Float[Array, "B L H D"], factor: float, *, invariant: bool
) -> Float[Array, "B L H D"]:
    """Multiplies queries by a factor."""
    if factor == 1.0:
        return q
    if invariant:
        return arithmetic.scale(q, factor)
    return (q * factor).astype(q.dtype)


class Attention(nnx.Module):
    """Projections to queries, keys and values, and back."""

    stored_value_size = 0
    """Channels of stored values that are read, the first; 0 is all."""

    def __init__(
        self,
        config: schema.Model,
        *,
        out_std: float,
        matmul_dtype: MatmulDtype = "compute",
        rngs: nnx.Rngs,
    ):
        embed: Dims = (("embed", config.embed_size),)
        head_dim = ("head_dim", config.head_size)
        heads: Dims = (("heads", config.num_heads), head_dim)
        kv_heads: Dims = (("kv_heads", config.num_kv_heads), head_dim)
        linear = functools.partial(Linear, matmul_dtype=matmul_dtype, rngs=rngs)
        # Attention kernels cannot add the biases of queries, keys and values.
        from_stream = functools.partial(
            linear, embed, use_bias=config.has_input_bias, fuse_bias=True
        )
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.query_scale = query_scale(config)
        self.rotary_pairs: rotary.Pairs = config.rotary.pairs
        self.query = from_stream(heads)
        self.key = from_stream(kv_heads)
        self.value = from_stream(kv_heads)
        self.out = linear(heads, embed, std=out_std, use_bias=config.has_output_bias)
        self.sinks = (
            make_param((("heads", config.num_heads),), jnp.zeros)
            if config.attention_sinks
            else None
        )
        has_norms, by_head = (
            config.query_key_norm,
            config.query_key_norm_scope == "head",
        )
        self.defers = False
        """Whether `attend` takes `Projections`, of joined kernels."""
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        self.normalizes_heads = by_head
        query_dims, key_dims = [(head_dim,)] * 2 if by_head else (heads, kv_heads)
        self.query_norm = Norm(config, query_dims) if has_norms else None
        self.key_norm = Norm(config, key_dims) if has_norms else None

    def __call__(
        self,
        x: Float[Array, "B L M"] | Normalized,
        rotation: tuple[Array, Array] | None,
        attend: Attend,
        adapter_dropout: AdapterDropout | None = None,
    ) -> tuple[Any, Any]:
        """Projects, attends and projects back; returns outputs and cache."""
        heads = self._heads()
        if self.defers:
            outputs, cache = attend(self._defer(x, rotation), None, None, ())
        else:
            arrangements = heads.lay_queries, heads.lay_keys, heads.lay_keys
            q, k, v = project(
                x,
                (self.query, self.key, self.value),
                arrangements=arrangements,
                adapter_dropout=adapter_dropout,
            )
            q, k = self._rotate(q, k, rotation)
            outputs, cache = attend(q, k, v, (k, v))
        y = self.out(
            outputs, arrange=heads.lay_queries, adapter_dropout=adapter_dropout
        )
        return y, cache

    def _rotate(self, q, k, rotation):
        """Applies norms, rotation and scale to queries and keys."""
        if self.query_norm is not None and self.key_norm is not None:
            # Before the rotation, as in Qwen3 and OLMo 2.
            q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            cos, sin = rotation
            rotate = invariant_layers.rotate if self.invariant else rotary.rotate
            q, k = (rotate(y, cos, sin, self.rotary_pairs) for y in (q, k))
        return scale_queries(q, self.query_scale, invariant=self.invariant), k

    def _defer(self, x, rotation):
        """Leaves norms and rotation of a joined product to the store of keys."""
        linears = self.query, self.key, self.value
        product, bias = dot_joined(x, self.query), self.query.joined_bias
        bias = None if bias is None else bias[...]

        def split():
            y = product if bias is None else product + bias[None, None]
            q, k, v = split_joined(y, linears)
            return *self._rotate(q, k, rotation), v

        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm.factors(), self.key_norm.factors()
            norms = query, key, self.query_norm.eps
        return Projections(product, bias, norms, rotation, self.query_scale, split)

    def laid_sinks(self) -> Float[Array, " H"] | None:
        """Attention sink of each head, in the layout of heads on the mesh in use."""
        if self.sinks is None:
            return None
        return self._heads().lay_queries(self.sinks[...], 0)

    def _heads(self) -> tensor.Heads:
        return tensor.Heads.of(self.num_heads, self.num_kv_heads, tensor.num_shares())
