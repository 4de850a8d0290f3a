"""Kernels as single operations, for programs that are traced to be counted, never run.

A kernel says here, once, how many FLOPs the forward pass takes. Inside
`abstract_kernels` the public functions trace that operation in place of the kernel.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching

NAME = "abstract_kernel"
"""Name of the primitive that stands for a kernel."""

# A context of JAX, so that no cached trace of an abstract program is ever run.
_IS_ABSTRACT = jax.make_user_context(False)
_KERNEL = Primitive(NAME)
_KERNEL.multiple_results = True


def abstract_kernels() -> contextlib.AbstractContextManager[Any]:
    """Traces kernels as single operations inside a block."""
    return _IS_ABSTRACT(True)


def is_abstract() -> bool:
    """Whether kernels are traced as single operations."""
    return _IS_ABSTRACT.value


def call(
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    flops: float,
    causal_flops: float | None = None,
) -> list[jax.Array]:
    """Traces one operation with given results in place of a kernel.

    Args:
        operands: Arrays that the kernel reads. Each floating-point operand that depends
            on trained parameters costs as many FLOPs again in the backward pass, at
            most twice in all.
        results: Shapes of the arrays that the kernel writes.
        flops: FLOPs of the matrix products of the forward pass.
        causal_flops: For attention, FLOPs of the pairs of tokens that see each other;
            None for every other kernel.

    Returns:
        The results, which only a trace can read.
    """
    shapes = tuple((tuple(x.shape), jax.numpy.dtype(x.dtype)) for x in results)
    return _KERNEL.bind(
        *operands, shapes=shapes, flops=flops, causal_flops=causal_flops
    )


def _shapes_of_results(*_: Any, shapes: Any, **__: Any) -> list[Any]:
    return [ShapedArray(*shape) for shape in shapes]


def _batch(operands: Any, dims: Any, *, shapes: Any, **costs: Any) -> Any:
    """Maps a kernel over a batch: every array of every operand is read once."""
    sizes = zip(operands, dims, strict=True)
    (size,) = {x.shape[dim] for x, dim in sizes if dim is not None}
    costs = {name: x and size * x for name, x in costs.items()}
    shapes = tuple(((size, *shape), dtype) for shape, dtype in shapes)
    return _KERNEL.bind(*operands, shapes=shapes, **costs), [0] * len(shapes)


_KERNEL.def_abstract_eval(_shapes_of_results)
batching.primitive_batchers[_KERNEL] = _batch


def product_flops(*sides: int) -> float:
    """Counts the FLOPs of a matrix product of the given sides.

    Example:
        >>> product_flops(2, 3, 4)
        48.0
    """
    return 2.0 * math.prod(sides)
