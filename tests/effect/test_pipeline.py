"""What stages, schedules and ZeRO do to a pipeline's memory and communication."""

import collections
import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest

from tests.support import pipelines
from tests.support.steps import make_step
from zjax.jaxprs.program import walk
from zjax.observe import hlo
from zjax.observe.collectives import OPS, list_collectives
from zjax.observe.communication import describe_communication, zero_volume
from zjax.parallel.pipeline_schedule import make_schedule
from zjax.settings import schema
from zjax.sharding import placement

MICROBATCHES, STAGES = 4, 4
TICKS = MICROBATCHES + STAGES - 1
TOKENS = pipelines.ROWS // 2 // MICROBATCHES * pipelines.LENGTH
"""Of one microbatch on one of two batch shards."""
STREAM = TOKENS * pipelines.WIDTH
"""Elements that a stage hands on, beside its auxiliary loss."""


def abstract(batch):
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}


def program(config, devices=None):
    step = make_step(config, devices)
    return step, step.compile(abstract(pipelines.make_batch(0)))


def on_four_stages(stage, schedule="1f1b"):
    return pipelines.make_config(
        mesh={"pipeline": STAGES, "data": 2},
        stage=stage,
        pipeline={"kind": schedule},
        tied_head=False,
        num_layers=8 if schedule == "interleaved" else 4,
    )


@functools.cache
def compiled(stage, schedule="1f1b"):
    step, train = program(on_four_stages(stage, schedule))
    return step, train.as_text()


def sent(stage, axis, schedule="1f1b"):
    """Elements in one step by operation, scalars aside, along one axis."""
    return sent_by(*compiled(stage, schedule), axis)


def sent_by(step, text, axis):
    shape, names = step.mesh.devices.shape, step.mesh.axis_names
    elements = collections.Counter()
    for each in list_collectives(text):
        places = [np.array(np.unravel_index(group, shape)) for group in each.groups]
        moves = sum((x != x[:, :1]).any(1) for x in places)
        along = [name for name, n in zip(names, moves, strict=True) if n]
        if along == [axis] and each.elements > 8:
            elements[each.op] += each.elements * each.times
    return elements


def elements_of(plan, is_stacked):
    """Of parameters, as they are stored, of which a stage has its share."""
    rows = [r for r in jax.tree.leaves(plan.master) if bool(r.num_layers) == is_stacked]
    over = [r for r in rows if "pipeline" in str(r.spec)]
    return sum(
        int(np.prod(row.stored_shape)) // (STAGES if row in over else 1) for row in rows
    )


def test_a_stage_holds_its_layers_and_its_share_of_the_vocabulary():
    """Fails if the stages keep each other's parameters."""
    run = pipelines.start(on_four_stages(0))
    for row in jax.tree.leaves(run.plan.master):
        splits = row.num_layers or "vocab" in row.path or row.path.endswith("tokens")
        whole = int(np.prod(row.stored_shape)) * 4
        share = STAGES if splits or row.path == "head/kernel" else 1
        assert row.device_bytes == whole // share, row.path
    leaf = run.state.master["blocks"]["mlp"]["up"]["kernel"]
    assert leaf.addressable_shards[0].data.shape[0] == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_neighbours_exchange_a_stream_and_its_cotangent_in_each_tick(stage):
    """Fails if parameters cross the stages, or streams more often than they must."""
    assert sent(stage, "pipeline")["collective-permute"] == 2 * TICKS * STREAM
    assert sent(stage, "pipeline")["all-gather"] == 0
    assert sent(stage, "pipeline")["all-to-all"] == 0


def neighbours(schedule):
    """Stages that hand to each other, from and to."""
    step, text = compiled(3, schedule)
    found = set()
    for each in list_collectives(text):
        if each.op == "collective-permute":
            places = np.unravel_index(np.array(each.groups), step.mesh.devices.shape)
            stages = places[step.mesh.axis_names.index("pipeline")]
            found |= {(a, b) for a, b in stages.tolist() if a != b}
    return found


def test_the_last_stage_hands_on_to_the_first_only_where_it_has_another_chunk():
    """Fails if 1F1B sends what nobody reads, over the longest way that there is."""
    line = {(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)}
    assert neighbours("1f1b") == line
    assert neighbours("interleaved") == line | {(3, 0), (0, 3)}


def test_gradients_are_reduced_once_in_a_step():
    """Fails if each microbatch, or each tick, adds gradients over the devices."""
    step, _ = compiled(1)
    own = elements_of(step.plan, True) + elements_of(step.plan, False)
    data = sent(1, "data")
    assert data["reduce-scatter"] == pytest.approx(own, rel=0.05)
    assert data["all-gather"] == pytest.approx(own, rel=0.05)
    assert data["all-reduce"] < 0.05 * own


def test_frozen_layers_have_neither_gradients_nor_masters():
    """Fails if a stage differentiates, sums or reduces more than its adapters."""
    config = dataclasses.replace(
        on_four_stages(2),
        lora=schema.Lora(rank=8),
        precision=schema.Precision(compute_dtype="bfloat16"),
    )
    step, train = program(config)
    rows = jax.tree.leaves(step.plan.master)
    for row in rows:
        assert row.is_frozen == ("lora" not in row.path)
        size = int(np.prod(row.stored_shape)) * (2 if row.is_frozen else 4)
        on_stages = STAGES if "pipeline" in str(row.spec) else 1
        assert row.device_bytes == size // on_stages // (1 if row.is_frozen else 2)
    learned = [row for row in rows if not row.is_frozen]
    own = sum(int(np.prod(row.stored_shape)) for row in learned) // STAGES
    data = sent_by(step, train.as_text(), "data")
    assert data["reduce-scatter"] == pytest.approx(TICKS * own, rel=0.05)
    assert data["all-gather"] == pytest.approx(own, rel=0.05)
    assert data["all-reduce"] < 0.05 * own
    pipeline = sent_by(step, train.as_text(), "pipeline")
    assert pipeline["collective-permute"] == 2 * TICKS * STREAM
    all_trained = sent(2, "pipeline")["all-reduce"]
    assert all_trained - pipeline["all-reduce"] >= STREAM


@pytest.mark.parametrize("stage", [1, 3])
def test_plan_judges_what_stages_move_over_data(stage):
    """Fails if the volume of a stage of layers is taken for that of the model, or is
    said of steps that communicate in each tick."""
    step, text = compiled(stage)
    said = describe_communication(list_collectives(text), step.plan, MICROBATCHES)
    moved = sum(sent(stage, "data").values()) + sent(stage, "data")["all-reduce"]
    wanted = zero_volume(step.plan, MICROBATCHES)
    assert (moved == pytest.approx(wanted, rel=0.03)) == (stage == 1)
    assert (f"ZeRO {stage} should move" in said) == (stage == 1)


def test_stage_2_reduces_in_each_tick_with_a_backward_pass():
    step, _ = compiled(2)
    own = elements_of(step.plan, True) + elements_of(step.plan, False)
    assert sent(2, "data")["reduce-scatter"] == pytest.approx(TICKS * own, rel=0.05)
    assert sent(2, "data")["all-gather"] == pytest.approx(own, rel=0.05)


def test_stage_3_fetches_layers_in_each_tick():
    """Fails if the compiler keeps what it fetched for one tick until the last."""
    step, _ = compiled(3)
    layers, num_ticks = elements_of(step.plan, True), TICKS + STAGES - 1
    found = sent(3, "data")["all-gather"]
    assert found >= num_ticks * layers
    assert found <= 3 * num_ticks * (layers + elements_of(step.plan, False))


def test_stages_hand_on_what_each_device_has_of_a_stream():
    """Fails if a stream that other axes split is joined before it is sent."""
    config = pipelines.make_config(
        mesh={"pipeline": 2, "sequence": 2, "tensor": 2},
        stage=0,
        tied_head=False,
        num_layers=2,
    )
    step, train = program(config)
    text = train.as_text()
    ticks, whole = MICROBATCHES + 1, 2 * STREAM
    found = sent_by(step, text, "pipeline")["collective-permute"] / (whole / 4)
    assert found in (2 * ticks, 2 * ticks - 1)  # the last one goes nowhere
    assert sent_by(step, text, "pipeline")["all-gather"] == 0


def conditions(text):
    """Whether each is of a stage by itself, and whether communication hangs on it."""
    module = hlo.parse_module(text)

    def communicates(name):
        return any(
            each.opcode.removesuffix("-start") in OPS
            or any(map(communicates, each.called))
            for each in module.computations[name]
        )

    for each in itertools.chain(*module.computations.values()):
        if each.opcode == "conditional":
            # The map over the data lies around the ticks, that over stages inside.
            is_own = "shard_map" in each.op_name.split("while/body")[-1]
            yield is_own, any(map(communicates, each.called))


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        (1, "1f1b"),
        (2, "1f1b"),
        (3, "1f1b"),
        (3, "interleaved"),
    ],
)
def test_no_communication_hangs_on_what_a_stage_decides(stage, schedule):
    """Fails if some stages communicate and others do not, which would wait forever."""
    found = collections.Counter(conditions(compiled(stage, schedule)[1]))
    assert (found[True, False] > 0) == (schedule == "interleaved"), "nothing to see"
    assert found[False, True] > 0
    assert found[True, True] == 0


def test_stages_add_split_gradients_where_they_are():
    """Fails if a stage brings a gradient into place under a condition of its own."""
    config = pipelines.make_config(
        mesh={"pipeline": 2, "sequence": 2, "tensor": 2},
        stage=0,
        pipeline={"kind": "interleaved"},
    )
    found = collections.Counter(conditions(program(config)[1].as_text()))
    assert found[True, False] > 0, "nothing to see"
    assert found[True, True] == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_layers_are_cut_before_the_first_tick(stage):
    """Fails if every tick copies the weights of its layers out of their stack."""
    config = pipelines.make_config(mesh={"pipeline": 2}, stage=stage, num_layers=4)
    text = program(config, jax.devices()[:2])[1].as_text()
    in_ticks = [line for line in text.splitlines() if "while/body/" in line]
    assert in_ticks
    assert not [line for line in in_ticks if "shard_map/slice" in line]


def traced(config, devices):
    step = make_step(config, devices)
    batch = abstract(pipelines.make_batch(0))
    state = placement.abstract_tree(step.executor.state_plan)
    with jax.set_mesh(step.mesh):
        return [*walk(jax.make_jaxpr(step.programs["train"])(state, batch))]


@pytest.mark.parametrize(("mesh", "copies"), [({}, False), ({"tensor": 2}, True)])
def test_chunks_are_read_where_they_are(mesh, copies):
    """Fails if each tick copies the weights of its chunk, where nothing that hangs on
    this choice communicates."""
    config = pipelines.make_config(
        mesh={"pipeline": 2, **mesh},
        num_layers=4,
        compute_dtype="bfloat16",
        pipeline={"kind": "interleaved", "recompute": False},
    )
    found = {
        each.primitive.name
        for each in traced(config, jax.devices()[: 2 * config.mesh.tensor])
        for x in each.outvars
        if (x.aval.shape, x.aval.dtype) == ((24, pipelines.WIDTH), "bfloat16")
    }
    assert found, "nothing to see"
    assert bool(found & {"cond", "dynamic_slice", "gather"}) == copies


@pytest.mark.parametrize(
    ("case", "adds"),
    [
        ({"remat": "full", "pipeline": {"recompute": False}}, True),
        ({"pipeline": "zb_h1"}, True),
        ({"mesh": {"pipeline": 2, "data": 2}}, True),
        ({"num_layers": 4, "pipeline": "interleaved"}, True),
        ({"mesh": {"pipeline": 2, "data": 2}, "stage": 2}, False),
        ({"mesh": {"pipeline": 2, "sequence": 2}}, False),
    ],
)
def test_products_add_to_the_sums_of_gradients(case, adds):
    """Fails if gradients of matrices are rounded, written and read to be added; or if
    what devices have to add up is twice as wide for it."""
    case = {"mesh": {"pipeline": 2, "data": 1}, "num_layers": 2} | case
    config = pipelines.make_config(compute_dtype="bfloat16", **case)
    size = config.mesh.data * config.mesh.sequence
    found = [
        each.outvars[0].aval.dtype
        for each in traced(config, jax.devices()[: 2 * size])
        if each.primitive.name == "dot_general"
        if each.outvars[0].aval.shape == (24, pipelines.WIDTH)
    ]
    assert found
    assert {dtype == "float32" for dtype in found} == {adds}


def test_what_waits_is_written_in_place():
    """Fails if the compiler makes one array of the first values of all buffers."""
    pipeline = "zb_h1"
    config = pipelines.make_config(
        mesh={"pipeline": 2}, stage=0, num_layers=2, pipeline=pipeline
    )
    text = program(config, jax.devices()[:2])[1].as_text()
    schedule = make_schedule("zb_h1", num_stages=2, num_microbatches=MICROBATCHES)
    for slots in {schedule.num_slots, schedule.num_operands} - {0}:
        stream = f"1,{slots + 1},{pipelines.ROWS // MICROBATCHES},{pipelines.LENGTH}"
        assert re.search(rf"= f32\[{stream},.* dynamic-update-slice\(", text)
        assert not re.search(rf"= f32\[{stream},\S+ copy\(", text)


def temporaries(schedule, num_microbatches, monkeypatch):
    rows = 2 * num_microbatches
    for name, value in (("ROWS", rows), ("LENGTH", 64), ("WIDTH", 32)):
        monkeypatch.setattr(pipelines, name, value)
    config = pipelines.make_config(
        mesh={"pipeline": 4, "data": 1},
        stage=0,
        num_microbatches=num_microbatches,
        pipeline={"kind": schedule},
    )
    config = dataclasses.replace(config, global_batch_size=rows)
    _, train = program(config, jax.devices()[:4])
    return train.memory_analysis().temp_size_in_bytes


def test_gpipe_keeps_every_microbatch_and_1f1b_a_few(monkeypatch):
    """Fails if more waits than what entered a stage, or for longer than it must,
    beside the batch itself in parts."""
    stream, batch = 2 * 64 * 32 * 4, 3 * 2 * 64 * 4
    gpipe = [temporaries("gpipe", n, monkeypatch) for n in (8, 16)]
    assert 7.8 * stream <= gpipe[1] - gpipe[0] <= 8 * (stream + batch)
    short, long = (temporaries("1f1b", n, monkeypatch) for n in (8, 16))
    assert long - short <= 8 * batch < stream
    assert gpipe[1] - long == pytest.approx((16 - 7) * stream, rel=0.3)
