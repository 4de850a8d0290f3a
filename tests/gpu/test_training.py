"""A small model trains on the GPU in each dtype, with the cuDNN kernel."""

import jax
import numpy as np
import pytest

from tests.support import small_run
from tests.support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_loss_falls_in_half_precision(tmp_path, compute_dtype, stage):
    trainer = small_run.fit(
        tmp_path,
        f"precision.compute_dtype={compute_dtype}",
        f"zero.stage={stage}",
        "num_steps=40",
        small_run.EVALUATED,
        "model.dropout_rate=0",
        "model.embed_size=64",
        "model.attention=cudnn",
        num_devices=jax.device_count(),
    )
    losses = small_run.losses(tmp_path)
    assert losses[40] < losses[1] - 0.5
    batch = next(iter(trainer.loader))
    with jax.set_mesh(trainer.run.mesh):
        compiled = trainer.run.step.compile(batch)
    assert "__cudnn$fmha" in compiled.as_text()
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    trainer.close()
