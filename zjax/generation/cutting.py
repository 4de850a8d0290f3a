"""Weights of a decoder, cut into the arrays of each block: planned, or at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from zjax.generation.passes import Reader, Weights
from zjax.generation.sizes import has_room
from zjax.sharding.layers import is_layers, layers_of
from zjax.sharding.placement import abstract_tree, array_bytes
from zjax.typing import Params


class Unread(NamedTuple):
    """Weights of a decoder that are still in files."""

    plans: Any
    """`ArrayPlan` of each array."""
    read: Callable[[], Params]
    """Reads the weights onto the devices; nothing else uses the arrays."""

    @property
    def can_wait(self) -> bool:
        """Whether programs compile while the weights are read.

        XLA measures kernels in memory that the reading must leave free. Blocks of
        stacks that stages of a pipeline hold are known when they are cut.
        """
        plans = jax.tree.leaves(self.plans)
        is_stacked = any(plan.num_layers for plan in plans)
        num_bytes = sum(plan.device_bytes for plan in plans)
        return not is_stacked and has_room(num_bytes, num_copies=1)


def planned_weights(reader: Reader, plans: Any) -> Weights:
    """Returns shapes and shardings of cut weights, as the programs that cut have them.

    The programs are compiled here, and cut the weights later.
    """
    embed, segments, head = reader.stack.split(abstract_tree(plans))
    blocks = []
    for number, layers in enumerate(segments):
        count = reader.stack.segments[number].num_blocks
        one = layers_of(layers, count)[0]
        compiled = _cut_block.lower(reader, number, one, None).compile()
        blocks += [outputs_of(compiled)] * count
    return Weights(embed, tuple(blocks), head)


def outputs_of(compiled: jax.stages.Compiled) -> Any:
    """Returns the shapes and shardings of what a program returns."""

    def describe(x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding
        if x.dtype == jnp.int4:
            # JAX 0.10: a CPU has another layout than the program that makes the array.
            one: Any = jnp.zeros((1,) * x.ndim, x.dtype)
            sharding = Format(one.format.layout, sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(describe, compiled.out_info)


def planned_bytes(weights: Weights) -> int:
    """Counts the bytes on a device of planned weights."""
    # An array that embedding and head share is there once.
    ends = {id(x): x for x in jax.tree.leaves((weights.embed, weights.head))}
    arrays = *ends.values(), *jax.tree.leaves(weights.blocks)
    return sum(array_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in arrays)


def cut_weights(reader: Reader, params: Params, *, is_owned: bool) -> Weights:
    """Cuts weights block by block; deletes owned weights as soon as they are cut."""
    # A program would copy a table that embedding and head share for each of them.
    embed, segments, head = reader.stack.split(params)
    blocks = []
    for number, stacked in enumerate(segments):
        count, is_apart = reader.stack.segments[number].num_blocks, _is_apart(stacked)
        for index in range(count):
            one = layers_of(stacked, count)[index] if is_apart else stacked
            place = None if is_apart else np.int32(index)
            block = jax.block_until_ready(_cut_block(reader, number, one, place))
            blocks.append(block)
            if is_owned and (is_apart or index == count - 1):
                _delete(one, block)
    return Weights(embed, tuple(blocks), head)


def _is_apart(stacked: Params) -> bool:
    """Whether the layers of parameters are separate arrays."""
    leaves = jax.tree.leaves(stacked, is_leaf=is_layers)
    return all(map(is_layers, leaves))


def _delete(params: Params, kept: Params) -> None:
    """Deletes arrays but for buffers that other arrays took over."""
    buffers = {_buffer_of(x) for x in jax.tree.leaves(kept)}
    for x in jax.tree.leaves(params):
        if _buffer_of(x) not in buffers:
            x.delete()


def _buffer_of(x: jax.Array) -> int:
    """Returns the address of the first shard here."""
    return x.addressable_data(0).unsafe_buffer_pointer()


_cut_block = jax.jit(Reader.cut_block, static_argnums=(0, 1))
