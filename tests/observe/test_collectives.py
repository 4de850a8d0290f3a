"""Collectives counted in programs, and what stages should move by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tests.support import experts, models, runs
from zjax.observe import hlo
from zjax.observe.collectives import Collective, list_collectives, mesh_axes
from zjax.observe.communication import describe_communication, zero_volume
from zjax.settings import schema

N = 64
RING = [(i, (i + 1) % 4) for i in range(4)]


def make_mesh():
    return jax.make_mesh((2, 4), ("replica", "data"), (AxisType.Auto,) * 2)


def count(program, mesh=None, dtype=jnp.float32):
    """What a function of x[64] on each device communicates."""
    mesh = mesh or make_mesh()
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    x = jax.ShapeDtypeStruct((N,), dtype)
    found = list_collectives(jax.jit(mapped).lower(x).compile().as_text())
    return [
        (each.op, each.elements, mesh_axes(each.groups, mesh), each.times)
        for each in found
    ], sum(each.wire_bytes for each in found)


def scatter(x):
    return lax.psum_scatter(jnp.tile(x, 4), "data", tiled=True) / 2


def repeat(body, length):
    return lambda x: lax.scan(lambda c, _: (body(c), None), x, None, length=length)[0]


def add_over(*axes):
    return lambda x: lax.psum(x, axes) / 8


def branch(x):
    def both(x):
        return add_over("replica")(add_over("data")(x))

    return lax.cond(x[0] > 0, both, add_over("data"), x)


@pytest.mark.parametrize(
    ("program", "expected", "wire_bytes"),
    [
        (lambda x: x + 1, [], 0),
        (add_over("data"), [("all-reduce", N, ("data",), 1)], 2 * 3 / 4 * 4 * N),
        (
            add_over("replica", "data"),
            [("all-reduce", N, ("replica", "data"), 1)],
            2 * 7 / 8 * 4 * N,
        ),
        (
            repeat(scatter, 7),
            [("reduce-scatter", 4 * N, ("data",), 7)],
            7 * 3 / 4 * 16 * N,
        ),
        (
            repeat(repeat(add_over("replica"), 3), 5),
            [("all-reduce", N, ("replica",), 15)],
            15 * 2 * 1 / 2 * 4 * N,
        ),
        (
            lambda x: lax.all_gather(x, "replica", tiled=True),
            [("all-gather", 2 * N, ("replica",), 1)],
            1 / 2 * 8 * N,
        ),
        (
            lambda x: lax.ppermute(x, "data", RING),
            [("collective-permute", N, ("data",), 1)],
            4 * N,
        ),
        (
            lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
            [("all-to-all", N, ("data",), 1)],
            3 / 4 * 4 * N,
        ),
        (
            repeat(branch, 2),
            [("all-reduce", N, ("data",), 2), ("all-reduce", N, ("replica",), 2)],
            2 * (3 / 2 + 1) * 4 * N,
        ),
    ],
)
def test_every_collective_is_counted_with_its_bytes_and_axes(
    program, expected, wire_bytes
):
    assert count(program) == (expected, wire_bytes)


def test_bytes_are_those_of_the_dtype():
    """Fails if elements are taken for bytes, or the other way round."""
    found, wire_bytes = count(lambda x: lax.all_gather(x, "data"), dtype=jnp.uint8)
    assert found == [("all-gather", 4 * N, ("data",), 1)]
    assert wire_bytes == 3 / 4 * 4 * N


def test_axes_are_those_of_the_mesh_however_its_devices_are_ordered():
    """Fails if devices are taken by their ids."""
    devices = np.array(jax.devices()).reshape(4, 2).T
    mesh = Mesh(devices, ("replica", "data"))
    assert count(add_over("data"), mesh)[0] == [("all-reduce", N, ("data",), 1)]


def test_a_loop_of_unknown_length_is_counted_once_and_said_to_be():
    def until(x):
        return lax.while_loop(lambda c: c[0] < 9, add_over("data"), x)

    mapped = jax.shard_map(
        until, mesh=make_mesh(), in_specs=P(), out_specs=P(), check_vma=False
    )
    found = list_collectives(jax.jit(mapped).lower(jnp.ones(N)).compile().as_text())
    assert [(each.times, each.is_bounded) for each in found] == [(1, False)]


@pytest.mark.parametrize(
    ("attributes", "groups"),
    {
        "channel_id=1, replica_groups={{0,2},{1,3}}, x={}": [[0, 2], [1, 3]],
        "replica_groups={}, dimensions={0}": [list(range(8))],
        "dimensions={0}": [list(range(8))],
        "source_target_pairs={{0,1},{1,0}}": [[0, 1], [1, 0]],
        "replica_groups=[2,4]<=[8], x": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "replica_groups=[4,2]<=[2,4]T(1,0)": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "replica_groups=[4,2]<=[2,2,2]T(0,2,1), x": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "replica_groups=mesh['a'=2,'b'=4] {'a'}, x": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "replica_groups=mesh['a'=2,'b'=4] {'b','a'}": [list(range(8))],
        "replica_groups=mesh['a'=8] {'a':(2)2}": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}": (
            [[0, 2], [1, 3]]
        ),
        "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}": (
            [[0, 1], [2, 3], [4, 5], [6, 7]]
        ),
    }.items(),
)
def test_groups_are_read_in_every_form(attributes, groups):
    found = hlo.device_groups(attributes, 8)
    assert sorted(map(list, found)) == groups


GPU_TEXT = """\
HloModule jit_train, is_scheduled=true, num_partitions=8

%async_computation (p: bf16[8,16]) -> bf16[4,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %rs = bf16[4,16]{1,0} reduce-scatter(%p), channel_id=7, \
replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, to_apply=%add
}, execution_thread="main"

%body (c: (s32[], f32[32])) -> (s32[], f32[32]) {
  %c = (s32[], f32[32]{0}) parameter(0)
  %g = f32[32]{0} get-tuple-element(%c), index=1
  %ar-start = ((f32[32]{0}), f32[32]{0}) all-reduce-start(%g), channel_id=4, \
replica_groups=mesh['axis_0'=8] {'axis_0'}, to_apply=%add, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %first = f32[32]{0} fusion(%g), kind=kLoop, calls=%fused
  %other-start = ((f32[2]{0}), f32[16]{0}) all-gather-start(%h), channel_id=5, \
replica_groups=[1,8]<=[8], dimensions={0}
  %other-done = f32[16]{0} all-gather-done(%other-start)
  %gemm = (f32[32]{0}, s8[4]{0}) custom-call(%g), custom_call_target="__cublas$gemm"
  %ar-done = f32[32]{0} all-reduce-done(%ar-start)
  ROOT %t = (s32[], f32[32]{0}) tuple(%i, %ar-done)
}

ENTRY %main (x: bf16[8,16]) -> f32[32] {
  %x = bf16[8,16]{1,0} parameter(0), metadata={op_name="all-reduce(x)"}
  %ag-start = ((bf16[2,16]{1,0:T(8,128)S(1)}, s32[4]{0}), (bf16[16,16]{1,0}, \
/*index=1*/s32[32]{0})) all-gather-start(%a, %b), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, metadata={op_name="jit(f)/gather"}
  %reshape = bf16[4]{0} bitcast(%x)
  %ag-done = (bf16[16,16]{1,0}, s32[32]{0}) all-gather-done(%ag-start)
  %pair-start = (f32[8]{0}, f32[24]{0}) all-reduce-start(%a, %b), channel_id=2, \
replica_groups=[4,2]<=[8], to_apply=%add
  %pair-done = (f32[8]{0}, f32[24]{0}) all-reduce-done(%pair-start)
  %cp-start = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%a), \
channel_id=3, source_target_pairs={{0,4},{4,0}}
  %cp-done = f32[8]{0} collective-permute-done(%cp-start)
  %rs-start = ((bf16[8,16]{1,0}), bf16[4,16]{1,0}) async-start(%x), \
calls=%async_computation
  %loop = (s32[], f32[32]{0}) while(%start), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0"}}
  %rs-done = bf16[4,16]{1,0} async-done(%rs-start)
  ROOT %sync = f32[32]{0} all-reduce(%y), channel_id=9, replica_groups=[8,1]<=[8], \
to_apply=%add
}

%cond (c: (s32[], f32[32])) -> pred[] {
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

%fused (p.1: f32[32]) -> f32[32] {
  ROOT %double = f32[32]{0} add(%p.1, %p.1)
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
"""


def test_starts_and_ends_of_a_gpu_text_count_once():
    """Fails if operands of a start are added to its results, or a wrapper counts."""
    found = list_collectives(GPU_TEXT)
    assert [
        (e.op, e.dtype, e.elements, e.group_size, e.times, e.overlap) for e in found
    ] == [
        ("all-gather", "bf16", 256, 8, 1, 0),
        ("all-gather", "s32", 32, 8, 1, 0),
        ("all-reduce", "f32", 32, 2, 1, 0),
        ("collective-permute", "f32", 8, 2, 1, 0),
        ("reduce-scatter", "bf16", 128, 2, 1, 1),
        ("all-reduce", "f32", 32, 8, 6, 2),
        ("all-gather", "f32", 16, 8, 6, 0),
        ("all-reduce", "f32", 32, 1, 1, None),
    ]
    assert found[0].op_name == "jit(f)/gather"
    assert found[4].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [each.volume for each in found] == [256, 32, 64, 8, 128, 384, 96, 64]
    sent = [448, 112, 128, 32, 128, 6 * 224, 6 * 56, 0]
    assert [each.wire_bytes for each in found] == sent


MATRICES = 2 * models.WIDTH * models.HIDDEN
BIAS, STORED = 7, 8
HYBRID = schema.Mesh(replica=2, data=4)
TENSOR = schema.Mesh(data=4, tensor=2)
NODES = schema.Zero(
    stage=3,
    min_shard_elements=0,
    replicas=schema.Sharded(secondary_partition=True),
)


@pytest.mark.parametrize(
    ("stage", "num_microbatches", "settings", "volume"),
    [
        (0, 1, {}, 2 * (MATRICES + BIAS)),
        (0, 4, {}, 2 * (MATRICES + BIAS)),
        (1, 4, {}, 2 * (MATRICES + STORED)),
        (2, 1, {}, 2 * (MATRICES + STORED)),
        (2, 4, {}, (4 + 1) * (MATRICES + STORED)),
        (3, 1, {}, 3 * (MATRICES + STORED)),
        (3, 4, {}, 4 * 3 * (MATRICES + STORED)),
        (3, 2, {"min_elements": 8}, 2 * (3 * MATRICES + 2 * BIAS)),
        (0, 1, {"mesh": HYBRID}, 2 * (MATRICES + BIAS)),
        (1, 1, {"mesh": HYBRID}, (2 + 2 / 4) * (MATRICES + STORED)),
        (2, 1, {"mesh": TENSOR}, 2 * (MATRICES / 2 + STORED)),
        (1, 1, {"mesh": schema.Mesh(data=1, tensor=8)}, 0),
        (3, 1, {"mesh": HYBRID, "zero": NODES}, 3 * (MATRICES + STORED) + MATRICES / 4),
    ],
)
def test_volume_of_a_stage(stage, num_microbatches, settings, volume):
    plan = runs.make_small_plan(optax.sgd(0.1), stage, **settings)
    assert zero_volume(plan, num_microbatches) == volume


@pytest.mark.parametrize(("stage", "gathers"), [(0, 0), (1, 1), (2, 1)])
def test_a_step_gathers_what_its_stage_says(stage, gathers):
    """Fails if a stage does not gather parameters, or gathers them twice."""
    step = runs.make_small_step(optax.sgd(0.1), stage)
    found = list_collectives(step.compile(models.make_batch()).as_text())
    volume = sum(each.volume for each in found if each.op == "all-gather")
    assert volume == gathers * (MATRICES + STORED)


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        (schema.Mesh(data=1, expert=8), 0),
        (schema.Mesh(data=2, expert=4), 0),
        (schema.Mesh(data=2, expert=4), 1),
    ],
    ids=str,
)
def test_tokens_of_experts_are_counted_by_themselves(mesh, stage):
    """Fails if a step is said to reduce experts over devices that have others."""
    step = runs.make_small_step(
        optax.sgd(0.1), stage, mesh=mesh, model=experts.make_model()
    )
    found = list_collectives(step.compile(experts.make_batch(0)).as_text())
    text = describe_communication(found, step.plan, 1)
    rows = re.findall(r"(\w[\w ]+?) {2,}([\d,]+) ", text.split("volume")[-1])
    volumes = {name: int(n.replace(",", "")) for name, n in rows}
    tokens, returned = experts.TOKENS // 8 * mesh.expert, 2 * experts.WIDTH + 2
    assert volumes["tokens move to experts and back"] == tokens * (2 * returned + 2)
    moves = next(n for name, n in volumes.items() if name.startswith("this step"))
    # Sums of squares for the norm, the loss and its weight, two elements each.
    small = moves - volumes[f"ZeRO {stage} should move"]
    assert 0 <= small <= 32


def collective(op, elements, axes, *, times=1, overlap=None, is_bounded=True):
    groups = {
        "data": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "both": (tuple(range(8)),),
        "replica": ((0, 4), (1, 5), (2, 6), (3, 7)),
    }
    return Collective(
        op, "bf16", elements, groups[axes], times, is_bounded, overlap, ""
    )


TABLE = """\
what one device sends in a train step, Psi = 2,055 parameters
op                dtype   axes      count   overlap     bytes     Psi
─────────────────────────────────────────────────────────────────────
reduce-scatter    bf16    data          5         4   7.68 kB   2.491
all-reduce        bf16    replica       1         0   1.03 kB   0.500
below 0.001 Psi                         2         2       7 B   0.002
total                                   8         6   8.71 kB   2.994

volume                                  elements     Psi
────────────────────────────────────────────────────────
this step moves over replica and data      6,152   2.994
ZeRO 2 should move for 4 microbatches     14,392   7.003"""


def test_the_table_adds_up_by_kind():
    plan = runs.make_small_plan(optax.sgd(0.1), 2, mesh=HYBRID)
    found = [
        collective("reduce-scatter", 1024, "data", times=4, overlap=3),
        collective("reduce-scatter", 1024, "data", overlap=0),
        collective("all-reduce", 514, "replica"),
        collective("all-reduce", 1, "both", times=2, overlap=1),
    ]
    assert describe_communication(found, plan, 4) == TABLE


def test_a_table_says_what_is_uncertain_and_none_is_wider_than_80_columns():
    plan = runs.make_small_plan(optax.sgd(0.1), 3, mesh=HYBRID)
    permute = collective("collective-permute", 2055, "both", times=96, overlap=1)
    loop = collective("all-reduce", 4, "data", is_bounded=False)
    lines = describe_communication([permute, loop], plan, 96).splitlines()
    assert max(map(len, lines)) <= 80
    told = "A loop whose trip count the compiler does not know is counted once."
    assert lines[-1] == told


STAGES = schema.Mesh(pipeline=2, data=4)
JUDGED = """\
volume                                  elements     Psi
────────────────────────────────────────────────────────
this step moves over data                      6   0.003
ZeRO 1 should move for 4 microbatches      4,112   2.001
Transfers between pipeline stages are not compared."""
NOT_JUDGED = """\
volume                      elements     Psi
────────────────────────────────────────────
this step moves over data          6   0.003
Transfers between pipeline stages are not compared.
ZeRO 2 communicates in every pipeline tick; no volume is predicted."""


@pytest.mark.parametrize(("stage", "text"), [(1, JUDGED), (2, NOT_JUDGED)])
def test_pipelines_are_judged_as_far_as_they_can_be(stage, text):
    """Fails if a pipeline is held against what a step without stages moves."""
    plan = runs.make_small_plan(optax.sgd(0.1), stage, mesh=STAGES)
    found = [collective("all-reduce", 3, "data")]
    said = describe_communication(found, plan, 4)
    assert said.partition("\n\n")[2] == text


MESSAGES = """\
volume                                  elements     Psi
────────────────────────────────────────────────────────
this step moves over replica and data          6   0.003
Replicas send messages of their own, in some steps none; no volume is predicted."""


def test_messages_of_replicas_are_not_held_against_a_stage():
    """Fails if a local step seems to miss the gradients that ZeRO reduces."""
    plan = runs.make_small_plan(optax.sgd(0.1), 1, mesh=HYBRID)
    found = [collective("all-reduce", 3, "data")]
    said = describe_communication(found, plan, 1, sends_messages=True)
    assert said.partition("\n\n")[2] == MESSAGES
