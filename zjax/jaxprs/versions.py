"""Differences between versions of JAX, found by feature, and dtype promotion."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval


@contextlib.contextmanager
def dtype_promotion(kind: str = "standard") -> Iterator[None]:
    """Sets `jax_numpy_dtype_promotion` inside a block.

    Optax, and programs built on Optax, need the standard rules.

    Example:
        >>> with jax.numpy_dtype_promotion("strict"), dtype_promotion():
        ...     float(jax.numpy.int32(1) + jax.numpy.float32(0.5))
        1.5
    """
    # Entering the context needlessly would make compiled programs miss their caches.
    if jax.numpy_dtype_promotion.value == kind:
        yield
        return
    with jax.numpy_dtype_promotion(kind):
        yield


Closed = core.ClosedJaxpr


def is_program(x: Any) -> bool:
    """Whether `x` is a jaxpr, closed or not."""
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def close(program: Any) -> Closed:
    """Closes a jaxpr with its constants; as of JAX 0.11 every jaxpr holds constants.

    Constants of a kernel are known at the call: here they are the first inputs.
    """
    if hasattr(program, "consts"):
        return program
    inputs = [*program.constvars, *program.invars]
    return Closed(program.replace(constvars=[], invars=inputs), ())


def without_dead_code(
    program: Closed, must_stay: Sequence[bool]
) -> tuple[Closed, list[bool]]:
    """Drops dead code, also in loops; returns which inputs remain."""
    jaxpr, stayed = partial_eval.dce_jaxpr(program.jaxpr, True, list(must_stay))
    return Closed(jaxpr, program.consts), stayed


def scan_sizes(equation: Any) -> tuple[int, int]:
    """Numbers of constants and of carried values of a scan, told in two ways by JAX."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len([*constants.vals]), len([*carry.vals])


def mapped_axes(equation: Any) -> frozenset[str]:
    """Mesh axes that a `shard_map` equation maps, named in two ways by JAX."""
    params = equation.params
    name = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
    return frozenset(params[name])


@functools.cache
def knows_option(name: str, value: Any) -> bool:
    """Whether this XLA has an option that takes the value, found by compiling."""
    # XLA checks the name of an option when it compiles a program.
    program = jax.jit(lambda: 0, compiler_options={name: value})
    try:
        program.lower().compile()
    except Exception as error:  # each release raises another class
        if name in str(error):
            return False
        raise
    return True
