"""What enters the blocks of a model, and waits elsewhere for the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.offload.units import units_by_block
from zjax.sharding.placement import ArrayPlan, abstract_key
from zjax.sharding.plan import DEVICE, Plan, while_it_waits
from zjax.train.compute_params import compute_dtype
from zjax.train.gradients import microbatches
from zjax.typing import Batch, Model


def kept_here(model: Model, config: Config) -> Callable[..., Any] | None:
    """What blocks that run one by one keep on the devices besides what enters them.

    Args:
        model: It says what the backward pass keeps.
        config: Read for `model.remat` and `model.activation_memory`.

    Returns:
        A policy of `jax.checkpoint`; None where they keep what enters them alone, which
        alone may rest elsewhere.
    """
    goes = config.model.activation_memory != DEVICE
    return None if goes or config.model.remat == "full" else model.keeps


def input_at_rest(
    x: jax.Array | jax.ShapeDtypeStruct, plan: Plan, config: Config
) -> ArrayPlan:
    """Where a part of what enters a block waits.

    Args:
        x: The part.
        plan: It is placed as a batch of this plan is.
        config: Read for `model.activation_memory` and `zero.nvme_paths`.

    Returns:
        Its place until the backward pass.
    """
    place = plan.batch_sharding(x)
    here = ArrayPlan("an input of a block", x.shape, x.dtype, place, place)
    return while_it_waits(here, config.model.activation_memory, config)


def waiting_inputs(
    model: Model, plan: Plan, config: Config, batch: Batch
) -> Sequence[ArrayPlan]:
    """What waits outside of the devices at the end of a forward pass.

    Args:
        model: The model as pure functions.
        plan: Placement of every array.
        config: Read for the batch, `model.activation_memory` and `zero.nvme_paths`.
        batch: Arrays or ShapeDtypeStructs of the global batch.

    Returns:
        Of one microbatch: one stream for each block, or two where it has tiles; none
        where they wait on the devices, or the model does not run block by block.
    """
    stack = model.stack
    stays = config.model.activation_memory == DEVICE or not plan.is_offloaded
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
    streams = sum(min(2, len(units)) for units in units_by_block(stack, params))
    entering = jax.tree.leaves(jax.eval_shape(enter, embed, batch, abstract_key()))
    return streams * [input_at_rest(x, plan, config) for x in entering]
