"""Differences between versions of JAX, detected by feature."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core
from jax.interpreters import partial_eval

Closed = core.ClosedJaxpr


def is_program(x: Any) -> bool:
    """Whether `x` is a jaxpr, closed or not."""
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def close(program: Any) -> Closed:
    """A jaxpr with its constants; as of JAX 0.11 every jaxpr holds its own.

    Constants of a kernel are known when it is called: here they are its first inputs.
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
