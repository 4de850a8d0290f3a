"""Where a plan stores arrays: meshes, the ZeRO rule, bytes, optimizer state."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support import runs
from tests.support.refusals import config_error, plan_error
from zjax.errors import PlanError
from zjax.estimate import tables
from zjax.settings import axes, schema
from zjax.sharding import memory, mesh, zero
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size, pin_tokens, row_axes
from zjax.sharding.mesh import axes_of
from zjax.sharding.param_plans import abstract_opt_state


def test_state_of_whole_numbers_stays_whole():
    """Fails if a table of counters of an optimizer is split over the devices, which
    read it wherever they are."""

    def init(params):
        del params
        return {"seen": jnp.zeros(1024, jnp.int32), "sums": jnp.zeros(1024)}

    def update(updates, state, params=None):
        del params
        return updates, state

    tx = optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.1))
    rows = jax.tree.leaves(runs.make_small_plan(tx, 2).opt_state)
    split = {row.path.split("/")[-1]: axes_of(row.spec, 1) for row in rows}
    assert split == {"seen": [()], "sums": [("data",)]}


def make_mesh():
    return meshes.make_mesh(schema.Mesh(replica=2, data=2, sequence=2))


def test_axes_split_by_hand_are_not_split_again():
    seen = []

    def look(x):
        seen.append((open_size(meshes.SEQUENCE), open_size(meshes.DATA), row_axes(4)))
        return x

    def trace(*axes):
        spec = P(axes[0] if axes else None)
        mapped = jax.shard_map(
            look, in_specs=spec, out_specs=spec, axis_names={*axes}, check_vma=False
        )
        jax.eval_shape(mapped if axes else look, jnp.ones(8))

    with jax.set_mesh(make_mesh()):
        trace()
        trace(meshes.SEQUENCE)
        trace(meshes.DATA)
    every = (meshes.REPLICA, meshes.DATA, meshes.EXPERT)
    rest = (meshes.REPLICA, meshes.EXPERT)
    assert seen == [(2, 2, every), (1, 2, every), (2, 1, rest)]


def test_rows_are_split_as_far_as_they_divide():
    with jax.set_mesh(make_mesh()):
        assert row_axes(2) == (meshes.REPLICA, meshes.EXPERT)
        assert row_axes(3) == (meshes.EXPERT,)


def test_tokens_are_pinned_where_the_batch_has_them():
    with jax.set_mesh(make_mesh()):
        placed = jax.jit(pin_tokens)(jnp.ones((4, 6, 3)))
        odd = jax.jit(pin_tokens)(jnp.ones((4, 5, 3)))
    assert placed.addressable_shards[0].data.shape == (1, 3, 3)
    assert odd.addressable_shards[0].data.shape == (4, 5, 3)


def test_mesh_has_every_axis_and_is_auto():
    made = mesh.make_mesh(schema.Mesh(tensor=2))
    assert set(made.axis_names) == set(mesh.AXES) == set(axes.AXES)
    assert axes.BATCH_AXES == mesh.BATCH_AXES
    assert (made.shape["data"], made.shape["tensor"], made.size) == (4, 2, 8)
    assert set(made.axis_types) == {AxisType.Auto}
    assert mesh.make_mesh(schema.Mesh(), jax.devices()[:2]).devices.size == 2
    assert mesh.abstract_mesh(schema.Mesh(tensor=8), 1024).shape["data"] == 128
    with config_error(
        "mesh='1x1x3x1x1x1' does not fill 8 devices; choose pipeline, replica, data, "
        "expert, sequence, tensor whose product is 8"
    ):
        mesh.make_mesh(schema.Mesh(data=3))


def test_tensor_neighbours_are_closest_and_stages_farthest():
    made = mesh.make_mesh(schema.Mesh(pipeline=2, data=2, tensor=2))
    groups = {
        "tensor": {(0, 1), (2, 3), (4, 5), (6, 7)},
        "data": {(0, 2), (1, 3), (4, 6), (5, 7)},
        "pipeline": {(0, 4), (1, 5), (2, 6), (3, 7)},
    }
    for axis, expected in groups.items():
        along = np.moveaxis(made.devices, made.axis_names.index(axis), -1)
        found = {tuple(d.id for d in group) for group in along.reshape(-1, 2)}
        assert found == expected, axis


@pytest.mark.parametrize("told", [[10, 7, 9], [10, None, 7]])
def test_memory_of_a_mesh_is_that_of_the_smallest_device(monkeypatch, told):
    """Fails too if whole numbers of bytes, as GPUs tell them, stay integers."""
    stats = [None if size is None else {"bytes_limit": size} for size in told]
    devices = [types.SimpleNamespace(memory_stats=lambda x=x: x) for x in stats]
    found = mesh.make_mesh(schema.Mesh(), jax.devices()[:1])
    monkeypatch.setitem(vars(found), "local_devices", devices)
    size = mesh.device_capacity_bytes(found)
    assert (size, type(size)) == (7, float)


DATA8 = mesh.abstract_mesh(schema.Mesh(), 8)
MIXED = mesh.abstract_mesh(schema.Mesh(data=4, sequence=2, tensor=2), 16)
EXPERTS = mesh.abstract_mesh(schema.Mesh(data=4, expert=2), 8)
HYBRID = mesh.abstract_mesh(schema.Mesh(replica=2, data=4), 8)


@pytest.mark.parametrize(
    ("on", "shape", "spec", "expected"),
    [
        (DATA8, (64, 32), P(), P("data", None)),
        (DATA8, (7, 64), P(), P(None, "data")),
        (DATA8, (7, 9), P(), P("data", None)),
        (DATA8, (7,), P(), P("data")),
        (DATA8, (50257,), P(), P("data")),
        (DATA8, (1,), P(), P()),
        (DATA8, (), P(), P()),
        (MIXED, (64, 32), P(), P(("data", "sequence"), None)),
        (MIXED, (6, 64), P(None, "tensor"), P(None, ("tensor", "data", "sequence"))),
        (MIXED, (64, 64), P("tensor", None), P("tensor", ("data", "sequence"))),
        (HYBRID, (64,), P(), P("data")),
        (EXPERTS, (16,), P("expert"), P(("expert", "data"))),
        (EXPERTS, (14,), P("expert"), P("expert")),
    ],
)
def test_extend_spec(on, shape, spec, expected):
    """Fails if the rule returns its input."""
    assert zero.extend_spec(shape, spec, on) == expected


def test_small_arrays_stay_whole_and_stacked_layers_are_not_split():
    assert zero.extend_spec((8, 7), P(), DATA8, min_elements=57) == P()
    assert zero.extend_spec((8, 7), P(), DATA8, min_elements=56) == P("data", None)
    stacked = zero.extend_spec((64, 3, 16), P(), DATA8, stacked_dims=(0,))
    assert stacked == P(None, None, "data")


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((50257, 3), P("data", None), (50264, 3)),
        ((8, 6), P(), (8, 6)),
        ((1,), P("data"), (8,)),
    ],
)
def test_stored_shape_rounds_up_to_equal_shares(shape, spec, expected):
    assert zero.stored_shape(shape, spec, DATA8) == expected


DEVICES = (1, 4, 16, 64, 256, 1024)
PAPER = {
    7.5e9: (
        "120 52.5 35.6 31.4 30.4 30.1",
        "120 41.3 21.6 16.6 15.4 15.1",
        "120 30 7.5 1.88 0.47 0.12",
    ),
    128e9: (
        "2048 896 608 536 518 513.5",
        "2048 704 368 284 263 257.8",
        "2048 512 128 32 8 2",
    ),
    1e12: (
        "16000 7000 4750 4187.5 4046.9 4011.7",
        "16000 5500 2875 2218.8 2054.7 2013.7",
        "16000 4000 1000 250 62.5 15.6",
    ),
}


@pytest.mark.parametrize("num_params", PAPER, ids="{:.3g}".format)
def test_zero_table_equals_the_paper(num_params):
    lines = tables.describe_zero_table(num_params, DEVICES).splitlines()[2:]
    columns = list(zip(*(line.split() for line in lines), strict=True))
    assert columns[0] == tuple(map(str, DEVICES))
    assert tuple(map(" ".join, columns[2:])) == PAPER[num_params]


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, 120), (1, 31.40625), (2, 16.640625), (3, 1.875)]
)
def test_closed_form_on_64_devices(stage, expected):
    assert memory.zero_bytes(7.5e9, 64, stage).total == expected * 1e9


PARAMS = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}


def refuse(updates, state, params=None):
    raise RuntimeError("no update today")


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            optax.masked(optax.sgd(0.1), lambda params: params["v"]),
            "optimizer='masked(chain(identity, scale))' fails on the parameters "
            "(KeyError: 'v'); correct what it raises",
        ),
        (
            optax.GradientTransformation(optax.identity().init, refuse),
            "optimizer='refuse' fails in an update from one mean gradient "
            "(RuntimeError: no update today); use a transformation that needs only "
            "gradient, params, value, grad and value_fn",
        ),
    ],
)
def test_what_an_optimizer_raises_is_told(tx, message):
    with plan_error(message):
        abstract_opt_state(tx, PARAMS)


def test_labels_of_another_form_are_told_with_the_form_of_parameters():
    tx = optax.masked(optax.sgd(0.1), [True])
    with pytest.raises(PlanError) as error:
        abstract_opt_state(tx, PARAMS)
    text = str(error.value)
    assert text.startswith("optimizer='masked(chain(identity, scale))' fails on the")
    assert "<class 'list'>" in text
    assert text.endswith(
        "; zjax holds parameters as nested dicts of arrays: give masks and labels that "
        "form, as nnx.to_pure_dict(mask) has"
    )


def test_numbers_of_64_bits_may_widen_updates_but_not_the_state():
    rate = np.float64(0.1)
    with jax.enable_x64(True):
        abstract_opt_state(optax.sgd(rate), PARAMS)
        with pytest.raises(PlanError) as error:
            abstract_opt_state(optax.scale_by_adam(b1=np.float64(0.9)), PARAMS)
    assert str(error.value) == (
        "optimizer='scale_by_adam' changes mu/w from float32(2, 3) to float64(2, 3) in "
        "an update; use a transformation that keeps shapes and dtypes, and give it "
        "Python numbers, not arrays or NumPy's float64"
    )
