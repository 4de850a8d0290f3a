"""Marks of tests that need a GPU."""

import jax
import pytest

from zjax_kernels.device import first_device

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]
NEEDS_HOPPER = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        jax.default_backend() != "gpu" or first_device()[1][0] != 9,
        reason="needs a Hopper GPU",
    ),
]
