"""Routers compute in float32, hence so do their matrices."""

import jax
import pytest

import zjax
from zjax.sharding.mesh import abstract_mesh
from zjax.sharding.plan import make_plan

SETTINGS = {
    "model": {
        "num_layers": 2,
        "embed_size": 1024,
        "num_heads": 2,
        "moe": {"every": 1, "num_experts": 4},
    },
}


@pytest.mark.parametrize("memory", ["none", "pinned_host"])
def test_matrices_of_routers_stay_float32(memory):
    """Fails if tokens are routed by logits of rounded weights."""
    config = zjax.load_config(SETTINGS, {"zero.offload": memory})
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    plan = make_plan(config, abstract_mesh(config.mesh, 8), model, tx)
    dtypes = {row.path: str(row.dtype) for row in jax.tree.leaves(plan.compute)}
    routers = {path: dtype for path, dtype in dtypes.items() if "router" in path}
    assert set(routers.values()) == {"float32"}
    assert {dtypes[path] for path in dtypes.keys() - routers} == {"bfloat16"}
