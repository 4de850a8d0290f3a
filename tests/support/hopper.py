"""Marks of tests that run kernels for Hopper GPUs."""

import jax
import pytest

from zjax_kernels.device import first_device

NEEDS_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu" or first_device()[1][0] != 9,
        reason="needs a Hopper GPU",
    ),
]
