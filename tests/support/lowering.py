"""Programs lowered for a GPU, on any machine."""

import jax


def cuda_program(function, *arrays):
    """The text of a program for CUDA; fails where Mosaic cannot lower a kernel."""
    traced = jax.jit(function).trace(*arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def num_kernels(function, *arrays):
    """How often the program runs a kernel."""
    return cuda_program(function, *arrays).count("custom_call @mosaic_gpu")
