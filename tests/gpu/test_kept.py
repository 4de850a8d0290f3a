"""What blocks keep on a GPU, where they run one by one."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support.gpu import NEEDS_GPU
from tests.support.offload import LLAMA, make_batch, make_config, start

pytestmark = NEEDS_GPU
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
