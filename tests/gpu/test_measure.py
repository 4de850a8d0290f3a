"""A measurement on GPUs knows their memory and their peak."""

import pathlib

import jax
import pytest

from zjax.bench import measure
from zjax.config import load_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]
CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "gpt2_124m.py"


def test_memory_is_near_what_the_compiler_says():
    found = measure(load_config(CONFIG))
    assert found.peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.3)
    assert found.state_bytes < found.peak_bytes
    if found.mfu is not None:
        assert 0 < found.mfu < found.mfu_full_attention < 1
