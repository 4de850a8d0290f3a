"""Sizes and shapes of the batches of a run, before any data is read."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding.mesh import BATCH_AXES, mesh_sizes
from zjax.sharding.plan import Plan
from zjax.typing import Batch


def with_batch_sizes(config: Config, num_devices: int) -> Config:
    """Fills in the three batch sizes of a config for a number of devices."""
    sizes = mesh_sizes(config.mesh, num_devices)
    batch = resolve_batch(config, math.prod(sizes[axis] for axis in BATCH_AXES))
    return dataclasses.replace(config, **dataclasses.asdict(batch))


def abstract_batch(config: Config, plan: Plan) -> Batch:
    """Global batch of a built-in model: shapes [B, L] and dtypes without data."""
    size = resolve_batch(config, plan.num_batch_shares).global_batch_size
    shape = (size, config.data.length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
