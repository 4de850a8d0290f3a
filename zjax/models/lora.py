"""Low-rank adapters of frozen matrices: LoRA and DoRA.

An adapter adds `alpha / rank * x a b` to the product `x W` of a frozen matrix W. It
starts without effect, as b is 0 (LoRA, Hu et al., arXiv:2106.09685). DoRA also learns
the length of each column of `W + alpha / rank * a b`, by which the sum is divided (Liu
et al., arXiv:2402.09353); as in the paper, the division has no gradient.

Adapters are parameters `lora/a`, `lora/b` and `lora/magnitude` beside `kernel`.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from flax import linen as nn
from flax import nnx
from flax.core import meta
from jaxtyping import Array, Float

from zjax.errors import ConfigError, Problem
from zjax.models import layers
from zjax.ops import invariant as ordered
from zjax.ops import invariant_layers
from zjax.ops.keys import fold_name
from zjax.ops.weights import column_lengths
from zjax.settings import schema
from zjax.settings.parameters import is_adapter
from zjax.sharding.naming import path_of

NAME = "lora"


def make_matrices(
    key: jax.Array,
    kernel: Array,
    num_inputs: int,
    num_outputs: int,
    settings: schema.Lora,
    only_block: jax.Array | None = None,
) -> dict[str, Array]:
    """Makes the first values of an adapter, by the number of the layer in a stack.

    Dims of `kernel` are dims of a stack, `num_inputs` input and `num_outputs` output
    dims. `only_block` is the number of the one layer in the stack, None for all.
    Returns `a` [..., *inputs, rank], `b` [..., rank, *outputs] and, for DoRA,
    `magnitude` [..., *outputs], the length of each column of the kernel.
    """
    last = kernel.ndim - num_outputs
    first = last - num_inputs
    stack, inputs, outputs = (
        kernel.shape[:first],
        kernel.shape[first:last],
        kernel.shape[last:],
    )
    # The variance 1 / (3 inputs), as of PEFT's Kaiming initialiser.
    bound = 1 / math.sqrt(math.prod(inputs))

    def draw(key: jax.Array) -> jax.Array:
        shape = (*inputs, settings.rank)
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    if stack:
        numbers = jnp.arange(math.prod(stack)) if only_block is None else only_block
        # By number, so that a layer made alone equals the layer made in its stack.
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(numbers.reshape(-1))
        a = jax.vmap(draw)(keys).reshape(*stack, *inputs, settings.rank)
    else:
        a = draw(key)
    made = {
        "a": a,
        "b": jnp.zeros((*stack, settings.rank, *outputs), jnp.float32),
    }
    if settings.form == "dora":
        squares = jnp.square(kernel.astype(jnp.float32))
        made["magnitude"] = jnp.sqrt(jnp.sum(squares, axis=range(first, last)))
    return made


def adapt_product(
    y: Float[Array, "..."],
    x: Float[Array, "..."],
    kernel: Array,
    matrices: dict[str, Any],
    settings: schema.Lora,
) -> Float[Array, "..."]:
    """Applies an adapter to `y`, the product of `x` and `kernel` without bias."""
    y = _add_product(y, x, matrices["a"], matrices["b"], settings)
    if settings.form == "lora":
        return y
    gain = _gain(kernel, matrices, settings).reshape(-1).astype(y.dtype)
    return y * jnp.broadcast_to(gain, y.shape)


def _add_product(
    y: Array,
    x: Array,
    a: Array,
    b: Array,
    settings: schema.Lora,
    *,
    invariant: bool = False,
) -> Array:
    """Adds the scaled product of `x`, `a` and `b` to `y`."""
    a, b = a.astype(y.dtype), _flat(b).astype(y.dtype)
    x, scale = x.astype(y.dtype), settings.alpha / settings.rank
    if invariant:
        narrow = invariant_layers.dot(x, a, a.ndim - 1)
        return ordered.add(y, ordered.product(invariant_layers.dot(narrow, b), scale))
    return y + scale * (jnp.tensordot(x, a, a.ndim - 1) @ b)


def _gain(kernel: Array, matrices: dict[str, Any], settings: schema.Lora) -> Array:
    """Returns DoRA's factor of a product, float32[*outputs]."""
    magnitude = matrices["magnitude"].astype(jnp.float32)
    scale = settings.alpha / settings.rank
    squares = _squares(kernel, matrices["a"], matrices["b"], scale)
    squares = jax.lax.stop_gradient(squares).reshape(magnitude.shape)  # as in the paper
    return magnitude / column_lengths(squares, jnp)


def _flat(b: Array) -> Array:
    return b.reshape(b.shape[0], -1)


def _squares(kernel: Array, a: Array, b: Array, scale: float) -> Float[Array, " N"]:
    """Sums squares of the columns of `kernel + scale * a b`, which is never formed."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    a, b = a.astype(kernel.dtype), _flat(b).astype(kernel.dtype)
    columns = kernel.reshape(-1, b.shape[1])
    a = a.reshape(columns.shape[0], -1)
    # |W + s a b|^2 = |W|^2 + 2 s b.(a'W) + s^2 b.(a'a b), with sums over columns.
    cross = product("ir,io->ro", a, columns)
    inner = product("ir,is->rs", a, a) @ b.astype(jnp.float32)
    squares = product("io,io->o", columns, columns)
    wide = b.astype(jnp.float32)
    return squares + jnp.sum(wide * (2 * scale * cross + scale**2 * inner), axis=0)


def without_adapters(params: Any) -> Any:
    """Zeroes the matrix `b` of each adapter: the frozen matrices then act alone.

    DoRA's magnitudes stay, so that it has no such form.
    """

    def one(keys: Any, x: Any) -> Any:
        # Layers that are stored apart add their number to the path.
        is_b = re.search(rf"(^|/){NAME}/b(/\d+)?$", path_of(keys))
        return jnp.zeros_like(x) if is_b else x

    return jax.tree_util.tree_map_with_path(one, params)


class Adapter(nnx.Module):
    """Matrices of an adapter.

    Args:
        path: Path of the layer, stored only if adapters draw by path: otherwise equal
            layers keep equal structures.
    """

    def __init__(self, matrices: dict[str, Array], settings: schema.Lora, path: str):
        self.settings, self.path = settings, path if settings.dropout else ""
        for name, value in matrices.items():
            setattr(self, name, nnx.Param(value))

    def __call__(
        self, y: Float[Array, "..."], x: Float[Array, "..."], kernel: Array
    ) -> Float[Array, "..."]:
        """Applies `adapt_product` with the adapter's matrices."""
        return adapt_product(y, x, kernel, self._matrices, self.settings)

    @property
    def factors(self) -> tuple[Array, Array]:
        """Matrices `a` and `b`."""
        own = self._matrices
        return own["a"], own["b"]

    def add_product(
        self,
        y: Float[Array, "..."],
        x: Float[Array, "..."],
        a: Array,
        b: Array,
        adapter_dropout: layers.AdapterDropout | None = None,
        *,
        invariant: bool = False,
    ) -> Float[Array, "..."]:
        """Adds the scaled product of `x` with `a` and `b`, or with shards of both.

        Shards are the kernel's rows of `a`, or the kernel's columns of `b`.
        `invariant` sums have one order.
        """
        if adapter_dropout is not None:
            x = adapter_dropout(x, f"{self.path}/{NAME}", self.settings.dropout)
        return _add_product(y, x, a, b, self.settings, invariant=invariant)

    def gain(self, kernel: Array) -> Float[Array, "..."]:
        """Returns DoRA's factor of the sum of both products, with the output dims."""
        return _gain(kernel, self._matrices, self.settings)

    @property
    def _matrices(self) -> dict[str, Array]:
        names = ("a", "b", "magnitude")
        return {n: getattr(self, n)[...] for n in names if hasattr(self, n)}


def is_target(path: str, settings: schema.Lora) -> bool:
    """Whether a layer with a matrix gets an adapter.

    Example:
        >>> is_target("blocks/mlp/up", schema.Lora(rank=1, targets=("attention",)))
        False
    """
    return any(re.search(pattern, path) for pattern in settings.targets)


def attach(
    module: nnx.Module,
    key: jax.Array,
    *,
    settings: schema.Lora,
    prefix: str = "",
    only_block: jax.Array | None = None,
) -> None:
    """Attaches adapters to the target layers of an NNX module, in place.

    An adapter's values follow from `key` and the layer's path behind `prefix`.
    Subclasses of Flax layers with another call are refused.
    """
    paths: list[tuple[str, Any]] = [
        ("/".join(map(str, (*([prefix] if prefix else []), *parts))), layer)
        for parts, layer in nnx.iter_modules(module)
    ]
    found = [(path, x) for path, x in paths if _sides(x) and is_target(path, settings)]
    _check_calls(found, (nnx.Linear, nnx.LinearGeneral))
    for path, layer in found:
        sides = _sides(layer)
        assert sides is not None
        own = make_matrices(
            fold_name(key, path), layer.kernel[...], *sides, settings, only_block
        )
        layer.lora = nnx.data(Adapter(own, settings, path))
        if not isinstance(layer, layers.Linear):
            # The object stays: user code may hold references to the layer.
            layer.__class__ = _adapted_class(type(layer))


def _check_calls(found: Iterable[tuple[str, Any]], kinds: Sequence[type]) -> None:
    """Refuses layers that override the call of a Flax layer, which a merge assumes."""
    problem = "overrides the call of {}, so that no adapter could be merged into it"
    remedy = "match other layers by lora.targets, or call a Flax layer inside a module"
    problems = [
        Problem(path, type(layer).__name__, problem.format(kind.__name__), remedy)
        for path, layer in found
        for kind in kinds
        if isinstance(layer, kind) and type(layer).__call__ is not kind.__call__
    ]
    if problems:
        raise ConfigError(*problems)


def _sides(layer: Any) -> tuple[int, int] | None:
    """Numbers of input and output dims of a layer that can have an adapter."""
    if isinstance(layer, layers.Linear):
        return layer.num_inputs, layer.num_outputs
    if isinstance(layer, nnx.Linear):
        return 1, 1
    if isinstance(layer, nnx.LinearGeneral) and not layer.batch_axis:
        number = len(layer.axis)
        is_last = sorted(layer.axis) == list(range(-number, 0))
        return (number, len(layer.out_features)) if is_last else None
    return None


@functools.cache
def _adapted_class(kind: type) -> type:
    """Makes a subclass of a Flax layer that applies the adapter in each call."""

    def call(self: Any, inputs: Array, *args: Any, **kwargs: Any) -> Array:
        y = kind.__call__(self, inputs, *args, **kwargs)
        bias = None if self.bias is None else self.bias[...]
        x = jnp.asarray(inputs)
        return _with_bias(self.lora, y, x, self.kernel[...], bias)

    return type(kind)(f"LoRA{kind.__name__}", (kind,), {"__call__": call})


def _with_bias(
    adapter: Callable[..., Array], y: Array, x: Array, kernel: Array, bias: Any
) -> Array:
    """Adapts the output of a Flax layer, bias included."""
    # x and y have the row dims, the kernel has all others.
    num_rows = (x.ndim + y.ndim - kernel.ndim) // 2
    flat = y.reshape(*x.shape[:num_rows], -1)
    if bias is None:
        return adapter(flat, x, kernel).reshape(y.shape)
    bias = jnp.broadcast_to(bias.reshape(-1).astype(y.dtype), flat.shape)
    # DoRA scales the product, not the bias.
    return (adapter(flat - bias, x, kernel) + bias).reshape(y.shape)


def linen_adapters(settings: schema.Lora, prefix: str = "") -> Any:
    """Returns a context in which target layers of Linen modules have adapters."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer, y = context.module, call(*args, **kwargs)
        path = "/".join((*([prefix] if prefix else []), *layer.path))
        # Interceptors see the calls of all methods.
        sides = _linen_sides(layer) if context.method_name == "__call__" else None
        if sides is None or not is_target(path, settings):
            return y
        _check_calls([(path, layer)], (nn.Dense, nn.DenseGeneral))
        x = jnp.asarray(args[0] if args else kwargs["inputs"])
        kernel, bias = (
            meta.unbox(layer.get_variable("params", name, None))
            for name in ("kernel", "bias")
        )
        matrices = layer.param(
            NAME, lambda key: make_matrices(key, kernel, *sides, settings=settings)
        )
        adapter = functools.partial(adapt_product, matrices=matrices, settings=settings)
        return _with_bias(adapter, y, x, kernel, bias)

    return nn.intercept_methods(intercept)


def _linen_sides(layer: nn.Module) -> tuple[int, int] | None:
    """Returns `_sides` of a Linen layer."""
    if isinstance(layer, nn.Dense):
        return 1, 1
    if not isinstance(layer, nn.DenseGeneral) or layer.batch_dims:
        return None
    axes, features = (
        x if isinstance(x, Sequence) else (x,) for x in (layer.axis, layer.features)
    )
    is_last = sorted(axes) == list(range(-len(axes), 0))
    return (len(axes), len(features)) if is_last else None


def warn_of_matrices_without_adapter(
    arrays: Iterable[tuple[str, Any]], settings: schema.Lora
) -> None:
    """Warns of target matrices in layers that take no adapter.

    Tables of embeddings, which multiply nothing, are left out.
    """
    shapes = {path: x.shape for path, x in arrays}
    layers_of = {path: path.rpartition("/")[0] for path in shapes}
    others = [
        f"{path}{list(shape)}"
        for path, shape in shapes.items()
        if len(shape) > 1
        and not is_adapter(path)
        and not path.endswith("embedding")
        and f"{layers_of[path]}/{NAME}/a" not in shapes
        and is_target(layers_of[path], settings)
        and not any(re.search(pattern, path) for pattern in settings.also_train)
    ]
    if others:
        text = "lora: frozen and without adapter, as their layers take none: %s"
        more = f" and {len(others) - 5} more" if others[5:] else ""
        logging.warning(text, ", ".join(others[:5]) + more)


def check_targets(paths: Iterable[str], settings: schema.Lora) -> None:
    """Refuses patterns that match no adapted layer, or no other parameter."""
    paths = list(paths)
    ending = f"/{NAME}/a"
    adapted = [p.removesuffix(ending) for p in paths if p.endswith(ending)]
    kernels = [p.removesuffix("/kernel") for p in paths if p.endswith("/kernel")]
    remedy = "give a Flax module with linear layers"
    if kernels:
        remedy = f"layers look like {', '.join(kernels[:3])}"
    problems = [
        Problem("lora.targets", pattern, "matches no linear layer", remedy)
        for pattern in settings.targets
        if not any(re.search(pattern, path) for path in adapted)
    ]
    others = [path for path in paths if not is_adapter(path)]
    problems += [
        Problem(
            "lora.also_train",
            pattern,
            "matches no parameter",
            f"parameters look like {', '.join(others[:3])}",
        )
        for pattern in settings.also_train
        if not any(re.search(pattern, path) for path in others)
    ]
    if problems:
        raise ConfigError(*problems)
