"""One mesh with all axes, or an error that says what would fill the devices."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from zjax.errors import ConfigError
from zjax.settings import axes, schema
from zjax.sharding import mesh


def test_mesh_has_every_axis_and_is_auto():
    made = mesh.make_mesh(schema.Mesh(tensor=2))
    assert set(made.axis_names) == set(mesh.AXES)
    assert (made.shape["data"], made.shape["tensor"], made.size) == (4, 2, 8)
    assert set(made.axis_types) == {AxisType.Auto}


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


def test_mesh_takes_the_devices_it_is_given():
    assert mesh.make_mesh(schema.Mesh(), jax.devices()[:2]).devices.size == 2


def test_mesh_that_does_not_fill_the_devices_is_refused():
    with pytest.raises(ConfigError) as error:
        mesh.make_mesh(schema.Mesh(data=3))
    assert str(error.value) == (
        "mesh='1x1x3x1x1x1' does not fill 8 devices; choose pipeline, replica, data, "
        "expert, sequence, tensor whose product is 8"
    )


@pytest.mark.parametrize("told", [[10, 7, 9], [10, None, 7]])
def test_memory_of_a_mesh_is_that_of_the_smallest_device(monkeypatch, told):
    """Fails too if whole numbers of bytes, as GPUs tell them, stay integers."""
    stats = [None if size is None else {"bytes_limit": size} for size in told]
    devices = [types.SimpleNamespace(memory_stats=lambda x=x: x) for x in stats]
    found = mesh.make_mesh(schema.Mesh(), jax.devices()[:1])
    monkeypatch.setitem(vars(found), "local_devices", devices)
    size = mesh.device_capacity_bytes(found)
    assert (size, type(size)) == (7, float)


def test_abstract_mesh_needs_no_devices():
    assert mesh.abstract_mesh(schema.Mesh(tensor=8), 1024).shape["data"] == 128


def test_config_is_checked_against_the_same_axes():
    assert axes.AXES == mesh.AXES
    assert axes.BATCH_AXES == mesh.BATCH_AXES
