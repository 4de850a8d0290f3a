"""On a GPU, log-probabilities of sampler and trainer are the same bits, too."""

import jax.numpy as jnp
import pytest

from tests.generation.test_invariance import (
    FAMILIES,
    PACKED,
    assert_same,
    make_model,
    write,
)
from tests.support.gpu import NEEDS_HOPPER
from zjax.generation.programs import CutDecoder

pytestmark = NEEDS_HOPPER


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", ["gpt", "llama", "gemma", "experts", "latents"])
def test_sampler_and_trainer_agree_to_the_last_bit(name, dtype):
    """Fails if XLA for GPUs contracts, reorders or rounds by what stands beside."""
    model = make_model(FAMILIES[name], dtype)
    decoder = CutDecoder(model)
    for chunk_size, packed in zip((5, 19), PACKED, strict=True):
        assert_same(write(decoder, chunk_size=chunk_size), model, packed)
