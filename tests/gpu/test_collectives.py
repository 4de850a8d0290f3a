"""What each ZeRO stage sends between GPUs, against the volumes of the paper."""

import collections

import jax
import pytest

from tests.support import small_run
from tests.support.gpu import NEEDS_GPU
from zjax.models.build import make_model
from zjax.observe.collectives import list_collectives
from zjax.observe.communication import zero_volume
from zjax.optim.build import make_optimizer
from zjax.run.batch import abstract_batch
from zjax.run.step import make_step
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import make_plan

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

MODEL = {
    "num_layers": 4,
    "embed_size": 512,
    "mlp_size": 2048,
    "num_heads": 8,
    "num_kv_heads": 8,
    "vocab_size": 8192,
    "max_length": 256,
    "dropout_rate": 0,
}
LARGE = 2**20


def train_step(stage, num_microbatches, devices=None):
    """The collectives of a bfloat16 step over all devices, and its plan."""
    config = small_run.make_config(
        "unused",
        f"zero.stage={stage}",
        "zero.min_shard_elements=16384",
        "precision.compute_dtype=bfloat16",
        "data.length=256",
        "global_batch_size=64",
        f"num_microbatches={num_microbatches}",
        *(f"model.{name}={value}" for name, value in MODEL.items()),
    )
    mesh = meshes.make_mesh(config.mesh, devices)
    model = make_model(config)
    tx = make_optimizer(config, model)
    plan = make_plan(config, mesh, model, tx)
    step = make_step(model, tx, plan, config)
    assert step.num_microbatches == num_microbatches
    text = step.compile(abstract_batch(config, plan)).as_text()
    return list_collectives(text), plan


@pytest.mark.parametrize(
    ("stage", "num_microbatches", "volumes"),
    [
        (0, 1, {"all-reduce": 2}),
        (1, 1, {"reduce-scatter": 1, "all-gather": 1}),
        (1, 4, {"reduce-scatter": 1, "all-gather": 1}),
        (2, 1, {"reduce-scatter": 1, "all-gather": 1}),
        (2, 4, {"reduce-scatter": 4, "all-gather": 1}),
        (3, 1, {"reduce-scatter": 1, "all-gather": 2}),
        (3, 4, {"reduce-scatter": 4, "all-gather": 8}),
    ],
)
def test_a_stage_moves_the_volume_of_the_paper(stage, num_microbatches, volumes):
    """Fails if the compiler gathers too often, or sends a wider dtype."""
    found, plan = train_step(stage, num_microbatches)
    psi = memory.num_params(plan)
    expected = dict(volumes)
    total = zero_volume(plan, num_microbatches)
    if stage == 3:
        # The loss uses the tied table in the forward pass alone, for its gradient too.
        spared = num_microbatches * MODEL["vocab_size"] * MODEL["embed_size"]
        expected["all-gather"] -= spared / psi
        total -= spared
    moved = collections.Counter()
    for each in found:
        if each.dtype == "bf16" and each.op in volumes:
            moved[each.op] += each.volume / psi
        else:
            assert each.num_bytes < LARGE, each
    assert moved == pytest.approx(expected, rel=0.03)
    assert sum(each.volume for each in found) == pytest.approx(total, rel=0.03)
