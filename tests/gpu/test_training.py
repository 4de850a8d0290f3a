"""A small model trains on the GPU in each dtype, twice alike, and keeps little."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support import small_run
from tests.support.gpu import NEEDS_GPU
from tests.support.offload import LLAMA, make_batch, make_config, start

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


MODEL = dataclasses.replace(LLAMA, vocab_size=30_000, embed_size=256, mlp_size=1024)


def two_steps(remat):
    """Losses and norms, and what the blocks kept in values of the stream."""
    model = dataclasses.replace(MODEL, remat=remat)
    precision = {"compute_dtype": "bfloat16"}
    run = start(make_config("pinned_host", model=model, precision=precision))
    state, found = run.state, []
    for number in range(2):
        state, metrics = run.step(state, make_batch(number, model.vocab_size))
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    passes = run.step.executor.step.backward
    share = make_batch(0)["tokens"].size // jax.device_count()
    one = share * model.embed_size * 2 * model.num_layers
    return found, passes.residual_bytes / one


@pytest.mark.parametrize(
    ("remat", "least", "most"),
    [("attention", 2, 2.1), ("elementwise", 12, 14), ("none", 12, 20)],
)
def test_blocks_keep_what_the_policy_names(remat, least, most):
    """Fails if a kernel's results are lost between programs, or weights are kept."""
    (found, kept), (expected, inputs) = map(two_steps, (remat, "full"))
    np.testing.assert_allclose(found, expected, rtol=0.02)
    assert inputs == 1
    assert least <= kept <= most
