"""`jax.jit` for the programs of a step that follow one another from the host."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zjax.compiler import Options
from zjax.offload.compiled import Jit
from zjax.sharding.mesh import is_simulated


def make_jit(mesh: Mesh | AbstractMesh, options: Options) -> Jit:
    """Compiles functions with the options of a run.

    On simulated devices each program runs alone: their collectives share threads, and
    two programs that wait for each other would never end.

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
