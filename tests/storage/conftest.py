import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.placement import ArrayPlan
from zjax.storage import files

CHUNK_BYTES = 64
"""Where chunks are small."""

SPECS = {
    "split": PartitionSpec("data"),
    "split along both dims": PartitionSpec("replica", "data"),
    "on every device": PartitionSpec(),
}


def make_row(disks, spec=SPECS["split"], dtype="float32", shape=(16, 12)):
    mesh = meshes.make_mesh(schema.Mesh(replica=2))
    sharding = NamedSharding(mesh, spec)
    return ArrayPlan(
        "blocks/x", shape, jnp.dtype(dtype), sharding, sharding, disks=tuple(disks)
    )


@pytest.fixture
def disks(tmp_path):
    paths = [tmp_path / name for name in ("first", "second")]
    for path in paths:
        path.mkdir()
    return tuple(map(str, paths))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", CHUNK_BYTES)
    files.chunk_shape.cache_clear()
    yield
    files.chunk_shape.cache_clear()
