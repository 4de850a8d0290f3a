"""What devices hold together, and in which dtype they add it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zjax.ops import shards
from zjax.settings import schema
from zjax.sharding import mesh as meshes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_of_a_model_are_averaged_in_float32(dtype):
    """Fails if statistics of a BatchNorm are added in 16 bits.

    Asked of the program before it is compiled: the compiler for CPUs adds in float32
    whatever it is told, those for GPUs do not.
    """
    mesh = meshes.make_mesh(schema.Mesh())
    mean = functools.partial(shards.mean_over, axes=("data",))
    mapped = jax.shard_map(
        mean, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    x = np.random.default_rng(0).normal(1, 100, (8, 64)).astype(jnp.dtype(dtype))
    found = jax.jit(mapped)(x)
    assert found.dtype == x.dtype
    expected = x.astype(np.float64).mean(0, keepdims=True)
    rounding = jnp.finfo(dtype).eps
    np.testing.assert_allclose(np.float64(found), expected, rtol=rounding, atol=1e-5)
    added = re.findall(r"(\w+)\[[\d,]*\] = psum\w*", str(jax.make_jaxpr(mapped)(x)))
    assert added == ["f32"]


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_counters_of_a_model_are_those_of_the_first_device(dtype):
    """Fails if what is counted in whole numbers is averaged, or differs by device."""
    mapped = jax.shard_map(
        lambda x: shards.mean_over(x[0], ("data",))[None],
        mesh=meshes.make_mesh(schema.Mesh()),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    x = jnp.array([3, *range(7)]).astype(dtype)
    found = jax.jit(mapped)(x)
    assert found.dtype == x.dtype
    assert found.tolist() == [x[0]] * 8
