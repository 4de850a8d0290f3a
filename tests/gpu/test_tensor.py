"""What a layer that is split over GPUs sends between them."""

import dataclasses

import jax
import pytest

from tests.support import tensor
from tests.support.gpu import NEEDS_GPU
from zjax.settings import schema

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        jax.device_count() not in (2, 4, 8), reason="needs 2, 4 or 8 NVIDIA GPUs"
    ),
]


@pytest.mark.parametrize("model", [tensor.GPT, tensor.LLAMA], ids=["gpt", "llama"])
def test_layer_gathers_and_scatters_the_stream_four_times(model):
    """Fails if the compiler splits, repeats or widens what the program says."""
    model = dataclasses.replace(model, embed_size=256, mlp_size=512)
    shares = jax.device_count()
    sent, _ = tensor.sent_per_layer(
        model,
        schema.Mesh(data=1, tensor=shares),
        shares,
        precision=schema.Precision(compute_dtype="bfloat16"),
    )
    assert sent == {"all-gather": 4, "reduce-scatter": 4}
