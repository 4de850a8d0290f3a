"""`jax.jit` for a step of several programs, which the host calls in turn."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zjax.compiler import Options
from zjax.offload.compiled import Jit
from zjax.sharding.mesh import is_simulated


def make_jit(mesh: Mesh | AbstractMesh, options: Options) -> Jit:
    """Makes a `jax.jit` with the compiler options of a run.

    On simulated devices the host waits for each program before it calls the next: the
    collectives of both would share threads and could wait for each other forever.

    Args:
        mesh: Devices of the run.
        options: Compiler options.

    Returns:
        A function with the arguments of `jax.jit`.
    """
    jit = functools.partial(jax.jit, compiler_options=options)
    if not is_simulated(mesh):
        return jit

    def jit_alone(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        program = jit(function, **settings)

        @functools.wraps(program)
        def run_alone(*args: Any) -> Any:
            return jax.block_until_ready(program(*args))

        run_alone.lower = program.lower  # type: ignore[attr-defined]
        return run_alone

    return jit_alone
