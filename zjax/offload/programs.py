"""The programs of a model in parts: embedding, one block, head, each there and back.

A block with tiles is a trunk, whose programs are those of any block, and one tile. All
programs of blocks take the number of the segment first, which is static.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import PlanError, Problem
from zjax.forward import combine, loss_of_sums
from zjax.offload.kept import kept_of, pull_with
from zjax.offload.units import gathered, rows_of_parts, trunk_of, units_by_block
from zjax.ops.keys import block_key
from zjax.sharding.memory import waiting_rows
from zjax.sharding.paths import path_of
from zjax.sharding.placement import ArrayPlan, pad_tree, place_tree
from zjax.sharding.plan import Plan
from zjax.train.compute_params import cast_like, compute_dtype
from zjax.train.gradients import microbatches, weighting
from zjax.typing import Auxiliary, Batch, Loss, Model, Params


class BlockPrograms:
    """Functions of parts of the parameters, as they are stored on the devices.

    Args:
        model: It has a stack.
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
        self.model, self.plan = model, plan
        self.num_microbatches, self.keeps = num_microbatches, keeps
        grads = waiting_rows(plan, num_microbatches)
        self.grad_tree = grads
        self.rows = rows_of_parts(self.stack, plan.compute)
        self.grad_rows = rows_of_parts(self.stack, grads)

    def rows_by_group(self) -> list[list[ArrayPlan]]:
        """Rows of the gradients that arrive together, as `groups_of` numbers them."""
        embed = jax.tree.leaves(self.grad_rows["embed"])
        blocks = units_by_block(self.stack, self.grad_tree)
        units = [jax.tree.leaves(unit) for block in blocks for unit in block]
        head = [
            row
            for keys, row in jax.tree_util.tree_leaves_with_path(self.grad_rows["head"])
            if path_of(keys) not in self.stack.shared
        ]
        return [*units, embed, head]

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
        carry, context = self.stack.embed(params, batch, block_key(key, 0))
        return self.held(carry), context

    def block(
        self,
        segment: int,
        params: Params,
        carry: Any,
        context: Any,
        key: jax.Array | None,
        number: jax.Array,
    ) -> Any:
        """The stream after a block, less its tiles, with what these read.

        Also what the block gives besides, and a number once all of it is there.
        """
        given = self.given(segment, params, context, key, number)
        params, context, block_key = given
        run = trunk_of(self.stack.segments[segment])
        carry, own = run(params, carry, context, block_key)
        return self.held(carry), own, jnp.float32(0)

    def block_kept(
        self,
        segment: int,
        params: Params,
        carry: Any,
        context: Any,
        key: jax.Array,
        number: jax.Array,
    ) -> Any:
        """The same, and what `keeps` has it leave to the backward pass."""
        given = self.given(segment, params, context, key, number)
        (left, loss), pull, metrics = self.pull_of(segment, given, carry)
        _check_same(carry, left[0])
        results = self.held(left), Auxiliary(loss, metrics), jnp.float32(0)
        return results, kept_of(pull, given)

    def given(
        self, segment: int, params: Params, context: Any, key: Any, number: Any
    ) -> Any:
        """What every program of a block has besides its stream."""
        params = self.in_use(("block", segment), params)
        return params, context, block_key(key, number + 1)

    def pull_of(self, segment: int, given: Any, carry: Any) -> Any:
        """A block as `jax.vjp` runs it.

        That is its stream and auxiliary loss, what takes their cotangents to its
        operands, and its metrics.
        """
        params, context, block_key = given
        run_trunk = trunk_of(self.stack.segments[segment])

        def run(params: Params, carry: Any) -> Any:
            stream, own = run_trunk(params, carry, context, block_key)
            return (stream, own.loss), own.metrics

        if self.keeps:
            run = jax.checkpoint(run, policy=self.keeps, prevent_cse=False)
        return jax.vjp(run, params, carry, has_aux=True)

    def tile(
        self,
        segment: int,
        params: Params,
        carry: Any,
        entering: Any,
        key: jax.Array | None,
        number: jax.Array,
    ) -> tuple[Any, jax.Array]:
        """The stream with what a tile adds to it; a number once it is."""
        params = self.in_use(("tile", segment), params)
        run = self.tile_of(segment)
        added = run(params, entering, block_key(key, number + 1))
        carry = jax.tree.map(jnp.add, carry, added)
        return self.held(carry), _number_of(carry)

    def tile_of(self, segment: int) -> Callable[..., Any]:
        """The function of its tiles."""
        tiles = self.stack.segments[segment].tiles
        assert tiles is not None
        return tiles.tile

    def head(
        self,
        params: Params,
        carry: Any,
        batch: Batch,
        scale: jax.Array,
        given: Sequence[Auxiliary],
    ) -> tuple[Loss, list[jax.Array], list[jax.Array], Any, jax.Array]:
        """Loss; gradients of own and shared arrays, of the stream, of a block's loss.

        The last is the same for all blocks.
        """

        def scaled(params: Params, carry: Any) -> tuple[jax.Array, Any]:
            loss = self.mean_loss(params, carry, batch, given)
            factor = scale * weighting.counted(loss.weight)
            return loss.value * factor, (loss, factor)

        differentiate = jax.grad(scaled, argnums=(0, 1), has_aux=True)
        found = differentiate(self.in_use("head", params), carry)
        (grads, cotangent), (loss, of_auxiliary) = found
        own, shared = [], []
        stored = self.stored("head", grads)
        for keys, grad in jax.tree_util.tree_leaves_with_path(stored):
            (shared if path_of(keys) in self.stack.shared else own).append(grad)
        return loss, own, shared, self.held(cotangent), of_auxiliary

    def head_loss(
        self, params: Params, carry: Any, batch: Batch, given: Sequence[Auxiliary]
    ) -> Loss:
        """The loss of a microbatch."""
        return self.mean_loss(self.in_use("head", params), carry, batch, given)

    def mean_loss(
        self, params: Params, carry: Any, batch: Batch, given: Sequence[Auxiliary]
    ) -> Loss:
        """The loss of a microbatch; the parameters are whole."""
        total, weight, sums = self.stack.head(params, carry, batch)
        loss = loss_of_sums(total, weight, sums, combine(given))
        return weighting.check_names(loss)

    def block_backward(
        self,
        segment: int,
        params: Params,
        left: Any,
        context: Any,
        key: jax.Array,
        number: jax.Array,
        cotangent: Any,
        of_entering: Any,
        of_auxiliary: jax.Array,
    ) -> tuple[list[jax.Array], Any, jax.Array]:
        """Gradients of a block and of what entered it; a number once they are.

        They follow from those of its stream, of what its tiles read and of its
        auxiliary loss, and from what the forward pass has left: what entered the block,
        or what it kept.
        """
        given = self.given(segment, params, context, key, number)
        # What entered the block may not be there, nor anything computed from it.
        entered = jax.tree.map(jnp.zeros_like, cotangent) if self.keeps else left
        (_, loss), pull, _ = self.pull_of(segment, given, entered)
        if self.keeps:
            pull = pull_with(left, pull, given)
        of_loss = None if loss is None else of_auxiliary.astype(loss.dtype)
        grads, cotangent = pull(((cotangent, of_entering), of_loss))
        stored = jax.tree.leaves(self.stored(("block", segment), grads))
        return stored, self.held(cotangent), _number_of(cotangent)

    def tile_backward(
        self,
        segment: int,
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
        run_tile, tile_key = self.tile_of(segment), block_key(key, number + 1)

        def run(params: Params, entering: Any) -> Any:
            return run_tile(params, entering, tile_key)

        whole = self.in_use(("tile", segment), params)
        _, pull = jax.vjp(run, whole, entering)
        grads, own = pull(cotangent)
        total = jax.tree.map(jnp.add, of_entering, own)
        stored = jax.tree.leaves(self.stored(("tile", segment), grads))
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
            return self.stack.embed(params, batch, block_key(key, 0))[0]

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

    def in_use(self, part: Any, params: Params) -> Params:
        """Parameters where they are used, as the function of a part takes them."""
        return gathered(params, self.rows[part])

    def stored(self, part: Any, grads: Params) -> Params:
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
