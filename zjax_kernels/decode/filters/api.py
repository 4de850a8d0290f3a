"""Filters of decoded tokens: checks, choice of implementation, and rows of `vmap`.

On one Hopper GPU a filter is one kernel, which a CUDA graph can hold in a branch; the
loops and the sort of the reference would make the host wait for the device. Where the
compiler splits the program over devices, the reference stays.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from zjax_kernels.decode.filters.reference import exact_sum
from zjax_kernels.device import (
    choose_implementation,
    describe,
    load_implementation,
    refuse,
)

Implementation = Literal["auto", "mosaic_gpu", "reference"]


def top_k_threshold(
    logits: Array, top_k: Array, *, implementation: Implementation = "auto"
) -> Array:
    """Finds the least of the `top_k` largest logits of each row.

    Args:
        logits: float32[R, V] without NaN.
        top_k: int32[R], 1 to V.
        implementation: `mosaic_gpu` (one Hopper GPU), `reference` (anywhere, any
            sharding), or `auto`: `mosaic_gpu` where possible, logged once; `reference`
            where the compiler shards the program.

    Returns:
        float32[R], the `top_k`-th largest logit.

    Raises:
        ValueError: Shapes or dtypes do not fit, or an unknown implementation.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> logits = jnp.array([[3.0, 1.0, 2.0], [0.0, 5.0, 5.0]])
        >>> top_k_threshold(logits, jnp.array([2, 1])).tolist()
        [2.0, 5.0]
    """
    _check(logits, {"top_k": (top_k, logits.shape[:1], jnp.int32)})
    run = _choose(implementation, logits, "top_k_threshold")
    return _over_rows(run)(logits, top_k)


def top_p_threshold(
    logits: Array,
    weights: Array,
    top_p: Array,
    *,
    implementation: Implementation = "auto",
) -> Array:
    """Finds the largest threshold whose logits have a share `top_p` of the weights.

    Weights are added as integers, so that no order of the additions, no shape of the
    program and no device changes a threshold.

    Args:
        logits: float32[R, V] without NaN.
        weights: float32[R, V], 0 to 1.
        top_p: float32[R], above 0 and up to 1.
        implementation: As in `top_k_threshold`.

    Returns:
        float32[R]; -inf where only all logits have the share.

    Raises:
        ValueError: As in `top_k_threshold`.
        NotImplementedError: As in `top_k_threshold`.

    Example:
        >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
        >>> found = top_p_threshold(logits, jnp.exp(logits), jnp.array([0.7]))
        >>> jnp.exp(found).round(3).tolist()
        [0.25]
    """
    arrays = {
        "weights": (weights, logits.shape, jnp.float32),
        "top_p": (top_p, logits.shape[:1], jnp.float32),
    }
    _check(logits, arrays)
    # Devices may take a smaller number for 0, which every threshold would satisfy.
    least = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
    wanted = least * exact_sum(weights)
    run = _choose(implementation, logits, "top_p_threshold")
    return _over_rows(run)(logits, weights, wanted)


def find_best(
    logits: Array,
    number: int,
    counts: Array,
    *,
    implementation: Implementation = "auto",
) -> tuple[Array, Array]:
    """Finds the largest logits of each row, the largest first, and the ids.

    Among equal logits the lowest id is first, as in `jax.lax.top_k`.

    Args:
        logits: float32[R, V] without NaN.
        number: Places of the result, 0 to V; static.
        counts: int32[R], logits that a row asks for, up to `number`; a kernel reads the
            row as often.
        implementation: As in `top_k_threshold`.

    Returns:
        float32[R, number] logits and int32[R, number] ids; -inf and 0 in places that a
        row does not ask for.

    Raises:
        ValueError: As in `top_k_threshold`.
        NotImplementedError: As in `top_k_threshold`.

    Example:
        >>> logits = jnp.array([[3.0, 1.0, 3.0], [0.0, 5.0, 4.0]])
        >>> values, ids = find_best(logits, 2, jnp.array([2, 1]))
        >>> values.tolist(), ids.tolist()
        ([[3.0, 3.0], [5.0, -inf]], [[0, 2], [1, 0]])
    """
    _check(logits, {"counts": (counts, logits.shape[:1], jnp.int32)}, number)
    # Kernels write no empty arrays.
    chosen = _choose(implementation if number else "reference", logits, "find_best")

    def run(logits, counts):
        return chosen(logits, number, jnp.minimum(counts, number))

    values, ids = _over_rows(run)(logits, counts)
    is_asked = jnp.arange(number, dtype=jnp.int32)[None] < counts[:, None]
    return jnp.where(is_asked, values, -jnp.inf), jnp.where(is_asked, ids, 0)


def _choose(implementation: str, logits: Array, name: str) -> Callable[..., Any]:
    """Returns a function of the chosen implementation."""
    num_rows, vocab_size = logits.shape
    chosen = choose_implementation(
        implementation,
        "filters of decoded tokens",
        f"a vocabulary of {vocab_size}",
        problem="" if num_rows else "it needs rows and there are none",
        remedy="give rows",
    )
    return getattr(load_implementation("decode.filters", chosen), name)


def _over_rows(run: Callable[..., Any]) -> Callable[..., Any]:
    """Makes rows of a dim of `vmap`, as each row has a program of a kernel anyway."""
    call = custom_vmap(run)

    @call.def_vmap
    def _(size: int, is_mapped: Sequence[bool], *arrays: Array):
        whole = [
            x if mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, mapped in zip(arrays, is_mapped, strict=True)
        ]
        found = call(*(x.reshape(-1, *x.shape[2:]) for x in whole))

        def split(x):
            return x.reshape(size, x.shape[0] // size, *x.shape[1:])

        return jax.tree.map(split, found), jax.tree.map(lambda _: True, found)

    return call


def _check(
    logits: Array, arrays: dict[str, tuple[Array, Any, Any]], number: int = 0
) -> None:
    """Refuses arrays that do not fit logits, and a number that is above V."""
    problems = []
    if logits.ndim != 2 or not logits.shape[1]:
        problem, remedy = "is not [R, V] with tokens", "give rows of logits"
        problems.append(describe("logits.shape", logits.shape, problem, remedy))
    elif not 0 <= number <= logits.shape[1]:
        problem = f"is not between 0 and a vocabulary of {logits.shape[1]}"
        problems.append(describe("number", number, problem, "ask for fewer"))
    known = {"logits": (logits, logits.shape, jnp.float32), **arrays}
    for name, (array, shape, dtype) in known.items():
        if array.shape != shape:
            problem = f"does not fit logits of shape {logits.shape}"
            problems.append(
                describe(f"{name}.shape", array.shape, problem, f"give {shape}")
            )
        if array.dtype != jnp.dtype(dtype):
            problem, remedy = f"is not {jnp.dtype(dtype).name}", "cast it"
            problems.append(describe(f"{name}.dtype", array.dtype, problem, remedy))
    refuse(problems)
