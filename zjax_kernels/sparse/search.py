"""Measures which tuning of the sparse kernels is fastest on this GPU.

Results are stored in the user's cache folder, and override the shipped tuning for this
kind of GPU and head size, unless segments are used.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from zjax_kernels.device import check_implementation, invalid, refuse
from zjax_kernels.sparse.arguments import integer_problems
from zjax_kernels.sparse.plan import Plan, check_plan
from zjax_kernels.sparse.reference import BackwardInputs, Options
from zjax_kernels.sparse.tuning import MEASURED, Tuning
from zjax_kernels.tunings import compiles, rank


def tune(
    plan: Plan, *, head_size: int, batch: int = 1, dtype: Any = jnp.bfloat16
) -> dict[str, list[tuple[Tuning, float]]]:
    """Measures which tuning runs a plan fastest, and stores it for this kind of GPU.

    Args:
        plan: Plan like the plans of later calls.
        head_size: Channels per head: 64, 96, 128 or 256.
        batch: Sequences per call, >= 1.
        dtype: bfloat16 or float16.

    Returns:
        Tunings and seconds per kernel (`forward`, `queries`, `keys`), fastest first.

    Raises:
        NotImplementedError: This GPU cannot run the kernels.
        ValueError: The kernels or the plan do not support the head size or dtype.

    Example:
        >>> from zjax_kernels.sparse import BigBird, make_plan
        >>> rule = BigBird(8, 64, attention="unidirectional")
        >>> plan = make_plan(rule.layout(16_384), num_kv_heads=2)
        >>> found = tune(plan, head_size=64)  # doctest: +SKIP
        >>> fastest, seconds = found["forward"][0]  # doctest: +SKIP
    """
    refuse(
        integer_problems("head_size", head_size, 1)
        + integer_problems("batch", batch, 1)
    )
    check_plan(plan, head_size=head_size)
    check_implementation("mosaic_gpu", dtype=jnp.dtype(dtype).name, head_size=head_size)
    results = {}
    for kernel, run in _kernels(plan, head_size, batch, dtype).items():
        tried = rank(_candidates(), run)
        if not tried:
            problem = f"leaves no room in shared memory for the kernel {kernel!r}"
            raise invalid("head_size", head_size, problem, "use a smaller head")
        results[kernel] = tried
    MEASURED.save(
        {(kernel, head_size): tried[0][0] for kernel, tried in results.items()}
    )
    return results


def _candidates() -> Iterator[Tuning]:
    """Returns the tunings to measure."""
    stages, tiles, has_producer = (1, 2, 3, 4), (1, 2), (False, True)
    return itertools.starmap(Tuning, itertools.product(stages, tiles, has_producer))


def _kernels(
    plan, head_size, batch, dtype
) -> dict[str, Callable[[Tuning], Callable[[], Any]]]:
    """Returns functions that compile a kernel, with random arrays, for a tuning."""
    from zjax_kernels.sparse import mosaic_gpu  # slow: imports the kernel compiler

    heads, kv_heads = (x.num_heads for x in (plan.queries, plan.keys))
    q_shape = (batch, plan.queries.num_rows, heads, head_size)
    k_shape = (batch, plan.keys.num_rows, kv_heads, head_size)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, (q_shape, k_shape, k_shape, q_shape), strict=True)
    )
    # Statistics do not change the time.
    sums = jnp.zeros((batch, heads, plan.queries.num_rows))
    options = Options(head_size**-0.5)
    inputs = BackwardInputs(q, k, v, d_out, sums, sums, None)
    arguments = {
        "forward": (mosaic_gpu.forward, (q, k, v, None, plan.queries)),
        "queries": (mosaic_gpu.backward_queries, (inputs, plan.queries)),
        "keys": (mosaic_gpu.backward_keys, (inputs, plan.keys)),
    }
    return {
        name: compiles(
            functools.partial(kernel, options=options),
            jax.tree.map(jnp.asarray, arrays),
        )
        for name, (kernel, arrays) in arguments.items()
    }
