"""The programs of a model in parts: embedding, one block, head, each there and back.

A block with tiles is a trunk, whose programs are those of any block, and one tile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import PlanError, Problem
from zjax.offload.kept import kept_of, pull_with
from zjax.offload.units import trunk_of, units_of, units_of_all
from zjax.ops.keys import part_key
from zjax.sharding.memory import waiting_rows
from zjax.sharding.paths import path_of
from zjax.sharding.placement import (
    ArrayPlan,
    pad_tree,
    place_tree,
    unpad_tree,
    use_tree,
)
from zjax.sharding.plan import Plan
from zjax.train.compute_params import cast_like, compute_dtype
from zjax.train.gradients import microbatches, weighting
from zjax.typing import Batch, Loss, Model, Params


class BlockPrograms:
    """Functions of parts of the parameters, as they are stored on the devices.

    Args:
        model: It has a stack of one segment.
        plan: Places parameters and gradients on the devices.
        num_microbatches: Parts of the batch that follow one another.
        keeps: What the forward pass of a block leaves to the backward pass, as a policy
            of `jax.checkpoint`; None leaves what enters the block.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        num_microbatches: int,
        keeps: Callable[..., Any] | None,
    ):
        assert model.stack is not None
        self.stack = model.stack
        (self.segment,) = self.stack.segments
        self.run_block = trunk_of(self.segment)
        self.model, self.plan = model, plan
        self.num_microbatches, self.keeps = num_microbatches, keeps
        grads = waiting_rows(plan, num_microbatches)
        self.grad_tree = grads
        self.rows = self.of_parts(plan.compute)
        self.grad_rows = self.of_parts(grads)

    def of_parts(self, rows: Any) -> dict[str, Any]:
        """Rows of the parameters, for `embed`, one `block`, its `tile`s and `head`."""
        embed, (blocks,), head = self.stack.split(rows)
        block, *tiles = units_of(self.segment, blocks[0])
        tile = tiles[0] if tiles else ()
        return {"embed": embed, "block": block, "tile": tile, "head": head}

    def rows_by_group(self) -> list[list[ArrayPlan]]:
        """Rows of the gradients that arrive together, as `groups_of` numbers them."""
        embed = jax.tree.leaves(self.grad_rows["embed"])
        _, (blocks,), _ = self.stack.split(self.grad_tree)
        units = units_of_all(self.segment, blocks)
        head = [
            row
            for keys, row in jax.tree_util.tree_leaves_with_path(self.grad_rows["head"])
            if path_of(keys) not in self.stack.shared
        ]
        return [*map(jax.tree.leaves, units), embed, head]

    def split_batch(self, batch: Batch, number: int) -> Batch:
        """One of the microbatches."""
        batch = microbatches.cast_batch(batch, self.model, compute_dtype(self.plan))
        parts = microbatches.split_batch(
            batch, self.model, self.num_microbatches, self.plan.num_batch_shares
        )
        return jax.tree.map(lambda x: x[number], parts)

    def embed(self, params: Params, batch: Batch, key: jax.Array | None) -> Any:
        """The stream that enters the first block, and what every block reads."""
        params = self.in_use("embed", params)
        carry, context = self.stack.embed(params, batch, part_key(key, 0))
        return self.held(carry), context

    def block(
        self,
        params: Params,
        carry: Any,
        context: Any,
        key: jax.Array | None,
        number: jax.Array,
        auxiliary: jax.Array,
    ) -> Any:
        """The stream after a block, what its tiles read, and the auxiliary loss so far.

        The stream is that without the tiles.
        """
        params, context, block_key = self.given(params, context, key, number)
        carry, own = self.run_block(params, carry, context, block_key)
        return self.held(carry), auxiliary + own

    def block_kept(
        self,
        params: Params,
        carry: Any,
        context: Any,
        key: jax.Array,
        number: jax.Array,
        auxiliary: jax.Array,
    ) -> Any:
        """The same, and what `keeps` has it leave to the backward pass."""
        given = self.given(params, context, key, number)
        (left, own), pull = self.pull_of(given, carry)
        _check_same(carry, left[0])
        return (self.held(left), auxiliary + own), kept_of(pull, given)

    def given(self, params: Params, context: Any, key: Any, number: Any) -> Any:
        """What every program of a block has besides its stream."""
        return self.in_use("block", params), context, part_key(key, number + 1)

    def pull_of(self, given: Any, carry: Any) -> Any:
        """Results of a block, and what takes their cotangents to its operands."""
        params, context, block_key = given

        def run(params: Params, carry: Any) -> Any:
            return self.run_block(params, carry, context, block_key)

        if self.keeps:
            run = jax.checkpoint(run, policy=self.keeps, prevent_cse=False)
        return jax.vjp(run, params, carry)

    def tile(
        self,
        params: Params,
        carry: Any,
        entering: Any,
        key: jax.Array | None,
        number: jax.Array,
    ) -> tuple[Any, jax.Array]:
        """The stream with what a tile adds to it; a number once it is."""
        assert self.segment.tiles is not None
        block_key = part_key(key, number + 1)
        params = self.in_use("tile", params)
        added = self.segment.tiles.tile(params, entering, block_key)
        carry = jax.tree.map(jnp.add, carry, added)
        return self.held(carry), _number_of(carry)

    def head(
        self,
        params: Params,
        carry: Any,
        batch: Batch,
        scale: jax.Array,
        auxiliary: jax.Array,
    ) -> tuple[Loss, list[jax.Array], list[jax.Array], Any]:
        """Loss; gradients of own and of shared arrays and of the stream."""

        def scaled(params: Params, carry: Any) -> tuple[jax.Array, Loss]:
            loss = self.mean_loss(params, carry, batch, auxiliary)
            return loss.value * scale, loss

        differentiate = jax.grad(scaled, argnums=(0, 1), has_aux=True)
        (grads, cotangent), loss = differentiate(self.in_use("head", params), carry)
        own, shared = [], []
        stored = self.stored("head", grads)
        for keys, grad in jax.tree_util.tree_leaves_with_path(stored):
            (shared if path_of(keys) in self.stack.shared else own).append(grad)
        return loss, own, shared, self.held(cotangent)

    def head_loss(
        self, params: Params, carry: Any, batch: Batch, auxiliary: jax.Array
    ) -> Loss:
        """The loss of a microbatch."""
        return self.mean_loss(self.in_use("head", params), carry, batch, auxiliary)

    def mean_loss(
        self, params: Params, carry: Any, batch: Batch, auxiliary: jax.Array
    ) -> Loss:
        """The loss of a microbatch; the parameters are whole."""
        total, weight, sums = self.stack.head(params, carry, batch)
        return weighting.loss_of_sums(total, weight, sums, auxiliary)

    def block_backward(
        self,
        params: Params,
        left: Any,
        context: Any,
        key: jax.Array,
        number: jax.Array,
        cotangent: Any,
        of_entering: Any,
        scale: jax.Array,
    ) -> tuple[list[jax.Array], Any, jax.Array]:
        """Gradients of a block and of what entered it; a number once they are.

        They follow from those of its stream and of what its tiles read, and from what
        the forward pass has left: what entered the block, or what it kept.
        """
        given = self.given(params, context, key, number)
        if self.keeps:
            # What entered the block is not there, nor is anything computed from it.
            nothing = jax.tree.map(jnp.zeros_like, cotangent)
            pull = pull_with(left, self.pull_of(given, nothing)[1], given)
        else:
            _, pull = self.pull_of(given, left)
        grads, cotangent = pull(((cotangent, of_entering), scale))
        stored = jax.tree.leaves(self.stored("block", grads))
        return stored, self.held(cotangent), _number_of(cotangent)

    def tile_backward(
        self,
        params: Params,
        entering: Any,
        key: jax.Array,
        number: jax.Array,
        cotangent: Any,
        of_entering: Any,
    ) -> tuple[list[jax.Array], Any, jax.Array]:
        """Gradients of a tile, and so far of what tiles read; a number once they are.

        The stream has the same cotangent before and after a tile.
        """
        assert self.segment.tiles is not None
        run_tile, block_key = self.segment.tiles.tile, part_key(key, number + 1)

        def run(params: Params, entering: Any) -> Any:
            return run_tile(params, entering, block_key)

        _, pull = jax.vjp(run, self.in_use("tile", params), entering)
        grads, own = pull(cotangent)
        total = jax.tree.map(jnp.add, of_entering, own)
        stored = jax.tree.leaves(self.stored("tile", grads))
        return stored, self.held(total), _number_of(total)

    def embed_backward(
        self,
        params: Params,
        batch: Batch,
        key: jax.Array,
        cotangent: Any,
        shared: list[jax.Array],
    ) -> list[jax.Array]:
        """Gradients of the embedding, with those of what the head shares."""

        def run(params: Params) -> Any:
            return self.stack.embed(params, batch, part_key(key, 0))[0]

        _, pull = jax.vjp(run, self.in_use("embed", params))
        (grads,) = pull(cotangent)
        stored = self.stored("embed", grads)
        of_head = dict(zip(self.stack.shared, shared, strict=True))
        return [
            grad + of_head[path_of(keys)] if path_of(keys) in of_head else grad
            for keys, grad in jax.tree_util.tree_leaves_with_path(stored)
        ]

    def no_cotangent(self, entering: Any) -> Any:
        """That of what tiles read, before the first of them."""
        return self.held(jax.tree.map(jnp.zeros_like, entering))

    def in_use(self, part: str, params: Params) -> Params:
        """Parameters where they are used, as the function of a part takes them."""
        rows = self.rows[part]
        return use_tree(unpad_tree(params, rows), rows)

    def stored(self, part: str, grads: Params) -> Params:
        """Gradients split over the devices."""
        rows = self.grad_rows[part]
        return pad_tree(place_tree(cast_like(grads, rows), rows), rows)

    def held(self, carry: Any) -> Any:
        """The stream where the batch is."""
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, self.plan.batch_sharding(x)),
            carry,
        )


def _check_same(entering: Any, leaving: Any) -> None:
    """Refuses a stream whose cotangent does not say how it entered a block."""
    types = [
        [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
        for tree in (entering, leaving)
    ]
    if types[0] != types[1]:
        problem = f"enters a block as {' '.join(types[0])}"
        remedy = "have embedding and blocks agree, or leave Model.keeps out"
        raise PlanError(Problem("stream", " ".join(types[1]), problem, remedy))


def _number_of(stream: Any) -> jax.Array:
    return jax.tree.leaves(stream)[0].ravel()[0]
