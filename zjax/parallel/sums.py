"""Sums of gradients over microbatches.

The gradient of a matrix is a product over all tokens. Computed alone the gradient is
rounded, written to memory and read again, to be added to a sum twice as wide. A product
that accumulates into the sum saves this traffic and the rounding.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.jaxprs import program as traced
from zjax.typing import Params


def add(totals: Params, grads: Params) -> Params:
    """Adds gradients to sums, in the dtype of the sums."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), totals, grads)


def replace_chunk(totals: list[Params], chunk: int, total: Params) -> list[Params]:
    """Replaces the sums of one chunk."""
    return [total if number == chunk else x for number, x in enumerate(totals)]


def add_to_chunk(totals: list[Params], grads: Params, chunk: jax.Array) -> list[Params]:
    """Adds gradients to the sums of one chunk, with a traced int32[] index."""

    def add_to(number: int, totals: list[Params]) -> list[Params]:
        return replace_chunk(totals, number, add(totals[number], grads))

    # Branches add in place; an indexed sum would be sliced out and written back.
    branches = [functools.partial(add_to, number) for number in range(len(totals))]
    return jax.lax.switch(chunk, branches, totals)


def add_in_products(
    function: Callable[..., tuple[Params, Any]], totals: Params, *args: Any
) -> tuple[Params, Any]:
    """Adds gradients to sums inside the products that compute the gradients.

    `function(*args)` returns gradients and other results. A gradient that is no
    product, or that other results depend on, is computed and then added.
    """
    program, (grads, other) = traced.trace(function, *args)
    (num_grads,) = traced.sizes(grads)
    grad_outputs, outs = program.outputs[:num_grads], program.outputs[num_grads:]
    paths = _paths_from_products(program, grad_outputs)
    pairs = zip(paths, grad_outputs, strict=True)
    wanted = [path[0].invars if path else [x] for path, x in pairs]
    known = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
    values = iter(program.compute([x for xs in wanted for x in xs] + outs, known))
    added = []
    for total, path, names in zip(jax.tree.leaves(totals), paths, wanted, strict=True):
        inputs = [next(values) for _ in names]
        x = _follow(path, inputs, total.dtype) if path else inputs[0]
        added.append(total + x.astype(total.dtype))
    return traced.like(totals, added), traced.like(other, list(values))


_PRODUCT = "dot_general"
_MOVES = traced.RESHAPES | {"convert_element_type"}
"""Primitives allowed between a product and the gradient."""


def _paths_from_products(program: traced.Program, names: list[Any]) -> list[list[Any]]:
    """Finds the equations from a product to each result; empty without such a path.

    A result that is rounded to integers or to float8 is rounded on purpose.
    """
    makers = {x: each for each in program.equations for x in each.outvars}
    read = [program.outputs, *(each.invars for each in program.equations)]
    readers = collections.Counter(
        x for atoms in read for x in traced.names_among(atoms)
    )

    def path(name: Any) -> list[Any]:
        equations: list[Any] = []
        # With a second reader the rounded gradient is needed anyway.
        while (
            traced.is_in(name, makers.keys()) and readers[name] == 1 and _is_wide(name)
        ):
            equations.insert(0, makers[name])
            kind = equations[0].primitive.name
            if kind == _PRODUCT:
                return equations
            if kind not in _MOVES:
                break
            name = equations[0].invars[0]
        return []

    return [path(name) for name in names]


def _is_wide(name: Any) -> bool:
    """Whether a value has a float dtype of 16 bits or more."""
    dtype = name.aval.dtype
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def _follow(path: list[Any], inputs: list[Any], dtype: Any) -> jax.Array:
    """Computes a product and the moves after it in a wider dtype."""
    (product, *moves), (left, right) = path, inputs
    x = _wide_product(product, left, right, dtype)
    for move in moves:
        if move.primitive.name != "convert_element_type":
            (x,) = traced.apply(move, [x])
    return x


def _wide_product(product: Any, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Computes a product into a wider dtype."""
    dtype = jnp.promote_types(product.outvars[0].aval.dtype, dtype)
    settings = product.params | {"preferred_element_type": dtype}

    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        return product.primitive.bind(x, y, **settings)

    def multiply_wide(x: jax.Array, y: jax.Array) -> jax.Array:
        default = settings | {"precision": None}
        return product.primitive.bind(x.astype(dtype), y.astype(dtype), **default)

    # XLA for CPUs lacks some products of 16 bits with wider results.
    return jax.lax.platform_dependent(x, y, cpu=multiply_wide, default=multiply)
