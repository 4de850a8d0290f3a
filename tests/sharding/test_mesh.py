"""One mesh with all axes, or an error that says what would fill the devices."""

import jax
import pytest
from jax.sharding import AxisType

from zjax.config import axes, schema
from zjax.errors import ConfigError
from zjax.sharding import mesh


def test_mesh_has_every_axis_in_order_and_is_auto():
    made = mesh.make_mesh(schema.Mesh(tensor=2))
    assert made.axis_names == mesh.AXES
    assert tuple(made.shape.values()) == (1, 1, 4, 1, 1, 2)
    assert set(made.axis_types) == {AxisType.Auto}


def test_mesh_takes_the_devices_it_is_given():
    assert mesh.make_mesh(schema.Mesh(), jax.devices()[:2]).devices.size == 2


def test_mesh_that_does_not_fill_the_devices_is_refused():
    with pytest.raises(ConfigError) as error:
        mesh.make_mesh(schema.Mesh(data=3))
    assert str(error.value) == (
        "mesh='1x1x3x1x1x1' does not fill 8 devices; choose pipeline, replica, data, "
        "expert, sequence, tensor whose product is 8"
    )


def test_abstract_mesh_needs_no_devices():
    assert mesh.abstract_mesh(schema.Mesh(tensor=8), 1024).shape["data"] == 128


def test_config_is_checked_against_the_same_axes():
    assert axes.AXES == mesh.AXES
    assert axes.BATCH_AXES == mesh.BATCH_AXES
