"""Bytes that traced programs send, against the collectives of compiled programs."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe import test_exchange as experts
from tests.parallel.test_ulysses import make_ulysses
from tests.support import pipelines, tensor
from tests.support import sequences as small
from tests.support.steps import make_step
from zjax.jaxprs.sent import count_sent
from zjax.jaxprs.versions import dtype_promotion
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.parallel.ring import ring_attention
from zjax.run.batch import abstract_batch
from zjax.settings import schema
from zjax.sharding import mesh as meshes

RING = [(i, (i + 1) % 4) for i in range(4)]


def send(x):
    return jax.lax.ppermute(x, "b", RING)


def repeat(x):
    return jax.lax.scan(lambda x, _: (jnp.sin(send(x)), None), x, None, length=5)[0]


def choose(x):
    return jax.lax.cond(x.sum() > 1, lambda x: send(send(x) + 1), send, x)


COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "b"),
    "pmax": lambda x: jax.lax.pmax(x, ("a", "b")),
    "psum of groups": lambda x: jax.lax.psum(
        x, "b", axis_index_groups=[[0, 1], [2, 3]]
    ),
    "all_gather": lambda x: jax.lax.all_gather(x, ("a", "b"), tiled=True),
    "psum_scatter": lambda x: jax.lax.psum_scatter(x, "b", tiled=True),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "b", 0, 0, tiled=True),
    "ppermute": send,
    "scan": repeat,
    "cond": choose,
    "checkpoint": jax.checkpoint(repeat),
}


def traced(function, mesh, *inputs):
    """The counted bytes, and the collectives of the compiled program."""
    with jax.set_mesh(mesh), dtype_promotion():
        program = jax.jit(function).trace(*inputs)
        text = program.lower().compile().as_text()
    return count_sent(program.jaxpr), list_collectives(text)


def by_axes(collectives, mesh):
    """Bytes that a device sends, by mesh axes."""
    found = collections.Counter()
    for each in collectives:
        found[mesh_axes(each.groups, mesh)] += each.wire_bytes
    return +found


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_send_what_the_compiled_program_sends(name):
    """Fails if a factor, a length or a branch is wrong, or an axis misses its part."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("a", "b"), auto)
    mapped = jax.shard_map(
        COLLECTIVES[name], in_specs=P(), out_specs=P(), check_vma=False
    )
    counted, found = traced(mapped, mesh, jnp.ones((8, 8)))
    (total,) = by_axes(found, mesh).values()
    assert counted.total() == total
    if "a" in counted:
        assert counted["b"] == 6 * counted["a"]  # (2 - 1) and 2 x (4 - 1) shards
    else:
        assert set(counted) == {"b"}


@pytest.mark.parametrize("sizes", [{"sequence": 4}, {"sequence": 2, "tensor": 2}])
@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_long_sequences(way, sizes):
    mesh = small.make_mesh(**sizes)
    causal = {"causal": True}
    ring = functools.partial(ring_attention, **causal)
    attend = ring if way == "ring" else make_ulysses(**causal)
    place = NamedSharding(mesh, P(meshes.BATCH_AXES, meshes.SEQUENCE, meshes.TENSOR))

    def run(q, k, v, d_out):
        out, back = jax.vjp(attend, q, k, v)
        return jax.lax.with_sharding_constraint((out, *back(d_out)), place)

    arrays = [jax.device_put(x, place) for x in small.make_arrays()]
    counted, found = traced(run, mesh, *arrays)
    sent = by_axes(found, mesh)
    # Two devices send keys forward and backward to the same neighbour: once, compiled.
    merged = (
        sum(x.nbytes for x in arrays[1:3]) / 8 if mesh.shape["sequence"] == 2 else 0
    )
    sent["sequence",] += merged * (way == "ring")
    assert {(axis,): size for axis, size in counted.items()} == sent


@pytest.mark.parametrize("name", ["all-to-all", "all-gather"])
def test_experts(name):
    mesh = meshes.make_mesh(schema.Mesh(data=1, expert=4), jax.devices()[:4])
    run = experts.differentiate(experts.ROUTERS[name])
    counted, found = traced(run, mesh, *experts.make_inputs())
    # Outside of `shard_map` the compiler places arguments and results.
    sent = by_axes((x for x in found if "shard_map" in x.op_name), mesh)
    assert {(axis,): size for axis, size in counted.items()} == sent


def traced_step(config):
    step = make_step(config)
    batch = step.inputs.abstract(abstract_batch(config, step.plan))
    inputs = step.executor.inputs_of("train", batch)
    return *traced(step.executor.programs["train"], step.mesh, *inputs), step.mesh


def test_pipelines():
    config = pipelines.make_config(mesh={"pipeline": 4, "data": 2})
    counted, found, mesh = traced_step(config)
    found = [x for x in found if "shard_map" in x.op_name]
    assert counted["data"] == by_axes(found, mesh)["data",]
    moved = [x for x in found if x.op == "collective-permute"]
    sent = by_axes(moved, mesh)["pipeline",]
    # The rest are sums over the stages; the compiler adds more of these.
    assert 0 < sent < counted["pipeline"] < by_axes(found, mesh)["pipeline",]


def test_tensor_parallel_layers():
    mesh = schema.Mesh(data=2, tensor=4)
    counted, found, mesh = traced_step(tensor.make_config(tensor.GPT, mesh))
    found = [x for x in found if "shard_map" in x.op_name and x.op != "all-reduce"]
    assert counted["tensor"] == by_axes(found, mesh)["tensor",]
