"""A small training state of every kind of leaf, placed on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zjax.checkpoint.store import Store
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.naming import path_of
from zjax.sharding.placement import ArrayPlan, pad
from zjax.sharding.zero import extend_spec

TX = optax.adamw(1e-3)


def make_params(width=6):
    """An embedding of 7 rows that divides over no mesh, and a tied or frozen vector."""
    rng = np.random.default_rng(0)
    return {
        "embed": rng.normal(size=(7, 3)).astype(np.float32),
        "blocks": [{"kernel": rng.normal(size=(16, width)).astype(np.float32)}],
        "frozen": np.arange(5, dtype=np.int32),
    }


def make_values(width=6):
    """What is to be saved: NumPy and key leaves in logical shapes."""
    params = make_params(width)
    state = TX.init({"embed": params["embed"], "blocks": params["blocks"]})
    noise = np.random.default_rng(1)
    state = jax.tree.map(
        lambda x: noise.normal(size=x.shape).astype(x.dtype) if x.ndim else x + 3, state
    )
    return {
        "step": np.int32(3),
        "master": params,
        "opt_state": state,
        "done": np.bool_(True),
        "half": np.asarray(jnp.arange(9, dtype=jnp.bfloat16)),
        "none": np.zeros((0, 3), np.float32),
        "key": jax.random.key(7),
    }


def make_rows(values, num_devices=8, *, stage=2, memory=None, **axes):
    mesh = meshes.make_mesh(schema.Mesh(**axes), jax.devices()[:num_devices])

    def row(keys, leaf):
        leaf = jnp.asarray(leaf)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        spec = PartitionSpec()
        if stage and floating and leaf.size:
            spec = extend_spec(leaf.shape, spec, mesh, min_elements=0)
        kind = memory if floating and leaf.ndim else None
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        return ArrayPlan(path_of(keys), leaf.shape, leaf.dtype, sharding, sharding)

    return jax.tree_util.tree_map_with_path(row, values)


def place(values, rows):
    def put(x, row):
        if jnp.issubdtype(row.dtype, jax.dtypes.prng_key):
            return jax.device_put(x, row.stored)
        return jax.device_put(pad(jnp.asarray(x), row), row.stored)

    return jax.tree.map(put, values, rows)


def save(directory, values, *steps, keep_last=3, extra=None, **where):
    """A store of one state, saved as some steps, on devices of a plan."""
    rows = make_rows(values, **where)
    store = Store(str(directory), keep_last=keep_last)
    for step in steps:
        told = {"at": step} | (extra or {})
        store.save(step, place(values, rows), rows, extra=told)
    store.close()
    return store


def assert_same(state, values, rows):
    """Values, dtypes, stored shapes, shardings and zero padding are all as planned."""

    def check(keys, x, value, row):
        name = path_of(keys)
        assert x.shape == row.stored_shape, name
        assert x.dtype == row.dtype, name
        assert x.sharding.is_equivalent_to(row.stored, x.ndim), name
        assert x.sharding.memory_kind == row.stored.memory_kind, name
        if jnp.issubdtype(row.dtype, jax.dtypes.prng_key):
            x, value = jax.random.key_data(x), jax.random.key_data(value)
        else:
            padded = np.zeros(row.stored_shape, row.dtype)
            padded[tuple(map(slice, row.shape))] = value
            value = padded
        np.testing.assert_array_equal(np.asarray(x), np.asarray(value), err_msg=name)

    jax.tree_util.tree_map_with_path(check, state, values, rows)
