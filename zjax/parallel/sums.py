"""Sums of gradients over microbatches.

The gradient of a matrix is a product over all tokens. By itself it is rounded, written
to memory and read again, to be added to a sum of twice its width; a product that starts
from that sum spares both ways and the rounding.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.jaxprs.interpret import apply
from zjax.jaxprs.primitives import RESHAPES
from zjax.jaxprs.program import Program, is_in, like, names_among, sizes, trace
from zjax.typing import Params


def add(totals: Params, grads: Params) -> Params:
    """Adds gradients to their sums.

    Args:
        totals: Sums.
        grads: A tree of the same structure, of any floating dtype.

    Returns:
        Sums in their own dtype.
    """
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), totals, grads)


def of_chunk(totals: list[Params], chunk: int, own: Params) -> list[Params]:
    """Puts other sums in the place of those of one chunk.

    Args:
        totals: Sums of each chunk.
        chunk: Its number.
        own: Its sums.

    Returns:
        The sums of all chunks.
    """
    return [own if number == chunk else x for number, x in enumerate(totals)]


def add_to_chunk(totals: list[Params], grads: Params, chunk: jax.Array) -> list[Params]:
    """Adds gradients to the sums of one chunk.

    Args:
        totals: Sums of each chunk.
        grads: Those of one.
        chunk: int32[], its number.

    Returns:
        The sums of all chunks.
    """

    def add_to(number: int, totals: list[Params]) -> list[Params]:
        return of_chunk(totals, number, add(totals[number], grads))

    ways = [functools.partial(add_to, number) for number in range(len(totals))]
    return jax.lax.switch(chunk, ways, totals)


def add_in_products(
    function: Callable[..., tuple[Params, Any]], totals: Params, *args: Any
) -> tuple[Params, Any]:
    """Adds gradients to their sums, in the products that make them.

    Args:
        function: `function(*args) -> (grads, other)`, pure.
        totals: Sums of such gradients.
        args: Of the function.

    Returns:
        The sums, and what else the function returns. A gradient that is no product, or
        that something else is computed from, is added as it is.

    Example:
        >>> x = jnp.full((2, 2), 1.5, "bfloat16")
        >>> total, _ = add_in_products(lambda x: (x @ x, ()), jnp.ones((2, 2)), x)
        >>> str(total.dtype), total.tolist()
        ('float32', [[5.5, 5.5], [5.5, 5.5]])
    """
    program, (grads, other) = trace(function, *args)
    (num_grads,) = sizes(grads)
    of_grads, outs = program.outputs[:num_grads], program.outputs[num_grads:]
    ways = _ways_from_products(program, of_grads)
    pairs = zip(ways, of_grads, strict=True)
    wanted = [way[0].invars if way else [x] for way, x in pairs]
    known = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
    values = iter(program.compute([x for xs in wanted for x in xs] + outs, known))
    added = []
    for total, way, names in zip(jax.tree.leaves(totals), ways, wanted, strict=True):
        inputs = [next(values) for _ in names]
        x = _walk(way, inputs, total.dtype) if way else inputs[0]
        added.append(total + x.astype(total.dtype))
    return like(totals, added), like(other, list(values))


_PRODUCT = "dot_general"
_MOVES = RESHAPES | {"convert_element_type"}
"""What may come between a product and its result."""


def _ways_from_products(program: Program, names: list[Any]) -> list[list[Any]]:
    """The operations from a product to each result; none where there is another way.

    A result that is rounded to whole numbers, or to float8, is rounded on purpose.
    """
    makers = {x: each for each in program.equations for x in each.outvars}
    read = [program.outputs, *(each.invars for each in program.equations)]
    readers = collections.Counter(x for atoms in read for x in names_among(atoms))

    def way(name: Any) -> list[Any]:
        found: list[Any] = []
        while is_in(name, makers.keys()) and readers[name] == 1 and _is_wide(name):
            found.insert(0, makers[name])
            kind = found[0].primitive.name
            if kind == _PRODUCT:
                return found
            if kind not in _MOVES:
                break
            name = found[0].invars[0]
        return []

    return [way(name) for name in names]


def _is_wide(name: Any) -> bool:
    dtype = name.aval.dtype
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def _walk(way: list[Any], inputs: list[Any], dtype: Any) -> jax.Array:
    """Goes the way without rounding."""
    (product, *moves), (left, right) = way, inputs
    x = _wide_product(product, left, right, dtype)
    for move in moves:
        if move.primitive.name != "convert_element_type":
            (x,) = apply(move, [x])
    return x


def _wide_product(product: Any, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    dtype = jnp.promote_types(product.outvars[0].aval.dtype, dtype)
    settings = product.params | {"preferred_element_type": dtype}

    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        return product.primitive.bind(x, y, **settings)

    def multiply_wide(x: jax.Array, y: jax.Array) -> jax.Array:
        default = settings | {"precision": None}
        return product.primitive.bind(x.astype(dtype), y.astype(dtype), **default)

    # XLA for CPUs lacks some products of 16 bits with wider results.
    return jax.lax.platform_dependent(x, y, cpu=multiply_wide, default=multiply)
