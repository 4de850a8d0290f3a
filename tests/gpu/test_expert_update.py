"""The optimizer step of experts holds no float32 copy of their gradients on a GPU.

DeepSpeed-TED updates tile by tile to avoid one (arXiv:2303.06318, section 4); here the
compiler converts, clips and applies a gradient in one loop.
"""

import math

import jax
import pytest

import zjax
from tests.support.gpu import NEEDS_GPU
from zjax.run.batch import abstract_batch

pytestmark = NEEDS_GPU

SETTINGS = {
    "mesh": {"data": 1},
    "microbatch_size": 1,
    "num_microbatches": 2,
    "global_batch_size": 0,
    "precision": {"grad_sum_dtype": "bfloat16"},
    "model": {
        "num_layers": 4,
        "embed_size": 512,
        "num_heads": 8,
        "max_length": 128,
        "moe": {"every": 2, "num_experts": 32},
    },
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_update_of_experts_has_no_copy_in_float32(dtype):
    config = zjax.load_config(SETTINGS, {"optimizer.rule.moment_dtype": dtype})
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    run = zjax.make_run(config, model, tx, devices=jax.devices()[:1])
    batch = abstract_batch(config, run.plan)
    with jax.set_mesh(run.mesh):
        grads, loss = jax.eval_shape(run.step.programs["gradients"], run.state, batch)
        update = run.step.programs["update"].lower(run.state, grads, loss, batch)
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(grads))
    assert num_params > 140e6
    temporary = update.compile().memory_analysis().temp_size_in_bytes
    assert temporary < 0.5 * num_params
