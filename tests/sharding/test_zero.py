"""The one ZeRO rule, on meshes without devices."""

import pytest
from jax.sharding import PartitionSpec as P

from zjax.settings import schema
from zjax.sharding import mesh, zero

DATA8 = mesh.abstract_mesh(schema.Mesh(), 8)
MIXED = mesh.abstract_mesh(schema.Mesh(data=4, sequence=2, tensor=2), 16)
EXPERTS = mesh.abstract_mesh(schema.Mesh(data=4, expert=2), 8)
HYBRID = mesh.abstract_mesh(schema.Mesh(replica=2, data=4), 8)


@pytest.mark.parametrize(
    ("on", "shape", "spec", "expected"),
    [
        pytest.param(DATA8, (64, 32), P(), P("data", None), id="outermost-of-equals"),
        pytest.param(DATA8, (7, 64), P(), P(None, "data"), id="another-dimension"),
        pytest.param(DATA8, (7, 9), P(), P("data", None), id="padded-least"),
        pytest.param(DATA8, (7,), P(), P("data"), id="seven-padded-to-eight"),
        pytest.param(DATA8, (50257,), P(), P("data"), id="prime-vocabulary-padded"),
        pytest.param(DATA8, (1,), P(), P(), id="one-element-stays-whole"),
        pytest.param(DATA8, (), P(), P(), id="scalar-stays-whole"),
        pytest.param(
            MIXED, (64, 32), P(), P(("data", "sequence"), None), id="sequence-too"
        ),
        pytest.param(
            MIXED,
            (6, 64),
            P(None, "tensor"),
            P(None, ("tensor", "data", "sequence")),
            id="minor-to-tensor",
        ),
        pytest.param(
            MIXED,
            (64, 64),
            P("tensor", None),
            P("tensor", ("data", "sequence")),
            id="a-dim-of-its-own-first",
        ),
        pytest.param(HYBRID, (64,), P(), P("data"), id="replicas-keep-copies"),
        pytest.param(
            EXPERTS, (16,), P("expert"), P(("expert", "data")), id="within-an-expert"
        ),
        pytest.param(
            EXPERTS, (14,), P("expert"), P("expert"), id="no-padding-within-an-expert"
        ),
    ],
)
def test_extend_spec(on, shape, spec, expected):
    """Fails if the rule returns its input."""
    assert zero.extend_spec(shape, spec, on) == expected


def test_small_arrays_stay_whole():
    assert zero.extend_spec((8, 7), P(), DATA8, min_elements=57) == P()
    assert zero.extend_spec((8, 7), P(), DATA8, min_elements=56) == P("data", None)


def test_stacked_layers_are_never_split():
    assert zero.extend_spec((64, 3, 16), P(), DATA8, stacked_dims=(0,)) == P(
        None, None, "data"
    )


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
