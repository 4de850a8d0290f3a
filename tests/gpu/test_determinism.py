"""Two runs of one configuration on GPUs end in the same bits."""

import jax
import numpy as np
import pytest

from tests.support import small_run
from tests.support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


LAYERS_WITH_CUDNN = (
    "model.attention=cudnn",
    "model.num_layers=3",
    "model.embed_size=128",
    "model.max_length=128",
    "data.length=128",
)


@pytest.mark.parametrize("shape", [(), LAYERS_WITH_CUDNN])
def test_deterministic_runs_are_equal_to_the_last_bit(tmp_path, shape):
    """Fails if `deterministic` lets an atomic sum through."""
    found = []
    for name in ("first", "second"):
        trainer = small_run.fit(
            tmp_path / name,
            "deterministic=true",
            "precision.compute_dtype=bfloat16",
            "num_steps=20",
            *shape,
            num_devices=jax.device_count(),
        )
        found.append(jax.tree.map(np.asarray, trainer.state))
    jax.tree.map(np.testing.assert_array_equal, *found)
