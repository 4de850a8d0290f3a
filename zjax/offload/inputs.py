"""Inputs of blocks, which may be stored off the devices until the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.offload.units import units_of
from zjax.sharding.placement import ArrayPlan, abstract_key
from zjax.sharding.plan import Plan, offload_pending
from zjax.train.compute_params import compute_dtype
from zjax.train.gradients import microbatches
from zjax.typing import Batch, Model


def saving_policy(model: Model, config: Config) -> Callable[..., Any] | None:
    """The policy of `jax.checkpoint` for what a block saves on the devices.

    Args:
        model: Its `keeps` is the policy.
        config: Read for `model.remat` and `model.activation_memory`.

    Returns:
        The policy; None where a block saves its input alone, which may be offloaded.
    """
    goes = config.model.offloads_inputs
    return None if goes or config.model.remat == "full" else model.keeps


def input_plan(
    x: jax.Array | jax.ShapeDtypeStruct, plan: Plan, config: Config
) -> ArrayPlan:
    """The plan of an input of a block, sharded like a batch, until the backward pass.

    Args:
        x: One array of the input.
        plan: Says how a batch is sharded.
        config: Read for `model.activation_memory` and `zero.nvme_paths`.
    """
    place = plan.batch_sharding(x)
    row = ArrayPlan("an input of a block", x.shape, x.dtype, place, place)
    return offload_pending(row, config.model.activation_memory, config)


def offloaded_inputs(
    model: Model, plan: Plan, config: Config, batch: Batch
) -> Sequence[ArrayPlan]:
    """Plans of the inputs of blocks that are stored off the devices.

    Args:
        model: The model as pure functions.
        plan: Placement of every array.
        config: Read for the batch, `model.activation_memory` and `zero.nvme_paths`.
        batch: Arrays or ShapeDtypeStructs of the global batch.

    Returns:
        Inputs of one microbatch, one for each block or two where it has tiles; none
        where they stay on the devices, or the model does not run block by block.
    """
    stack = model.stack
    stays = not (config.model.offloads_inputs and plan.is_offloaded)
    if stays or stack is None or not model.runs_by_block:
        return ()
    number = resolve_batch(config, plan.num_batch_shares).num_microbatches
    params = jax.tree.map(
        lambda row: jax.ShapeDtypeStruct(row.shape, row.dtype), plan.compute
    )

    def enter(params: Any, batch: Batch, key: jax.Array) -> Any:
        batch = microbatches.cast_batch(batch, model, compute_dtype(plan))
        parts = microbatches.split_batch(batch, model, number, plan.num_batch_shares)
        return stack.embed(params, jax.tree.map(lambda x: x[0], parts), key)[0]

    embed, _, _ = stack.split(params)
    num_inputs = sum(unit.tile <= 1 for unit, _ in units_of(stack, params))
    entering = jax.tree.leaves(jax.eval_shape(enter, embed, batch, abstract_key()))
    return num_inputs * [input_plan(x, plan, config) for x in entering]
