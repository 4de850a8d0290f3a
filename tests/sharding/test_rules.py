"""Model parallelism as a table of rules."""

import pytest
from jax.sharding import PartitionSpec as P

from zjax.errors import PlanError
from zjax.settings import schema
from zjax.sharding import mesh

MESH = mesh.abstract_mesh(schema.Mesh(tensor=2), 8)


@pytest.mark.parametrize(
    ("logical", "expected"),
    [
        (("embed", "heads", "head_dim"), P(None, "tensor", None)),
        (("layers", "mlp", "embed"), P(None, "tensor", None)),
        (("batch", "length", None), P("data", None, None)),
        ((), P()),
    ],
)
def test_spec_for(logical, expected):
    assert mesh.spec_for(logical, "x", MESH) == expected


@pytest.mark.parametrize(
    ("logical", "message"),
    [
        (
            ("heads", "mlp"),
            "w=('heads', 'mlp') claims the tensor axis twice; name one of the two dims "
            "None",
        ),
    ],
)
def test_impossible_names_are_refused(logical, message):
    with pytest.raises(PlanError) as error:
        mesh.spec_for(logical, "w", MESH)
    assert str(error.value) == message
