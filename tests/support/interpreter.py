"""The interpreter of GPU kernels, by the name that this JAX has for its parameters.

Each thread of a kernel compiles the program of all threads anew, which takes most of
the time of a small kernel: here the first thread does so for all others.
"""

import functools
import threading

import jax
from jax._src.core import eval_jaxpr
from jax._src.pallas.mosaic.interpret import thread_map

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

__all__ = ["InterpretGPUParams"]
LOCK = threading.Lock()


@functools.lru_cache(maxsize=8)
def compiled(jaxpr, shapes):
    """The program of a jaxpr, for constants and arguments of these shapes."""

    def run(consts, *args):
        eval_jaxpr(jaxpr, consts, *args)

    return jax.jit(run).lower(*jax.tree.unflatten(*shapes)).compile()


def run_jaxpr(jaxpr, consts, *args):
    """Runs a jaxpr in the program of the first thread."""
    shapes = jax.tree.map(jax.typeof, (consts, *args))
    leaves, tree = jax.tree.flatten(shapes)
    with LOCK:
        run = compiled(jaxpr, (tree, tuple(leaves)))
    run(consts, *args)


thread_map._run_jaxpr = run_jaxpr
