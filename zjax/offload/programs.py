"""Compiled programs of the parts of a model: embedding, units and head.

Programs of units take the index of the segment first, which is static.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zjax.errors import PlanError, Problem
from zjax.offload.compiled import Jit
from zjax.offload.units import gathered, rows_by_part
from zjax.ops.keys import block_key
from zjax.ops.remat import residuals_of, vjp_with
from zjax.ops.tokens import on_subset, take_tokens
from zjax.sharding.memory import pending_gradients
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_tree, pad_tree, place_tree
from zjax.sharding.plan import Plan, staged_plan
from zjax.sharding.roles import joined, trained
from zjax.stack.dropping import (
    BlockInput,
    block_on_tokens,
    draw_span,
    make_input,
    make_inputs,
    run_block,
)
from zjax.stack.forward import combine, loss_of_sums, stack_totals
from zjax.train import microbatches
from zjax.train.compute_params import cast_like, compute_dtype
from zjax.typing import (
    NOTHING_DROPPED,
    Auxiliary,
    Batch,
    Dropping,
    Loss,
    Model,
    Params,
    Tiles,
)


class BlockInputs(NamedTuple):
    """The inputs of a block besides parameters and stream.

    Args:
        context: Context from the embedding, without a gradient.
        key: Random key of the microbatch; None in evaluation.
        number: Index of the block in the stack.
        dropping: What the block drops alone, as `of_block` returns it.
    """

    context: Any
    key: Any
    number: Any
    dropping: Dropping = NOTHING_DROPPED

    @property
    def unit_key(self) -> jax.Array | None:
        """Random key of the block, which all tiles share."""
        return block_key(self.key, self.number + 1)


class BlockPrograms:
    """Programs of the parts of a model, with parameters on the devices.

    The attributes are the jitted functions. Some return a number at the end, which is
    ready once the program has ended. `policy` is a policy of `jax.checkpoint` for the
    residuals of a block; None saves the block's input.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        num_microbatches: int,
        policy: Callable[..., Any] | None,
        jit: Jit,
    ):
        assert model.stack is not None
        self.model, self.stack = model, model.stack
        self.plan = staged_plan(plan)
        self.num_blocks = sum(segment.num_blocks for segment in self.stack.segments)
        self.num_microbatches, self.policy = num_microbatches, policy
        self.grad_rows = pending_gradients(self.plan, num_microbatches)
        self._rows = rows_by_part(self.stack, self.plan.compute)
        self._masters = rows_by_part(self.stack, self.plan.master)
        # Frozen parameters have no gradient; plans stand in, so that the stack can
        # split them.
        grad_rows = joined(self.grad_rows, self.plan.compute, self.plan.master)
        self._grad_rows = {
            part: trained(rows, self._masters[part])
            for part, rows in rows_by_part(self.stack, grad_rows).items()
        }
        head_grads = jax.tree_util.tree_leaves_with_path(self._grad_rows["head"])
        paths = {path_of(keys) for keys, _ in head_grads}
        self._shared = [path for path in self.stack.shared if path in paths]
        jit_unit = functools.partial(jit, static_argnums=0)
        self.split_batch = jit(self._split_batch, static_argnums=1)
        self.embed = jit(self._embed)
        self.block = jit_unit(self._block)
        self.block_saving = jit_unit(self._block_saving) if policy else None
        # Donated: streams and cotangents, which the program replaces.
        self.tile = jit_unit(self._tile, donate_argnums=2)
        self.head = jit(self._head)
        self.head_loss = jit(self._head_loss)
        self.block_backward = jit_unit(self._block_backward, donate_argnums=4)
        self.tile_backward = jit_unit(self._tile_backward, donate_argnums=5)
        self.embed_backward = jit(self._embed_backward)
        self.zeros_like = jit(self._zeros_like)
        self.draw_layers = jit(self._draw_layers)
        self.no_gradients = jit_unit(self._no_gradients)
        self.no_results = jit_unit(self._no_results)
        self.span = jit(self._span)
        self.take = jit(self._take)
        self.replace = jit(self._replace)

    def _split_batch(self, batch: Batch, number: int) -> Batch:
        """Returns microbatch `number` of a batch."""
        batch = microbatches.cast_batch(batch, self.model, compute_dtype(self.plan))
        parts = microbatches.split_batch(
            batch, self.model, self.num_microbatches, self.plan.num_batch_shares
        )
        return jax.tree.map(lambda x: x[number], parts)

    def _embed(self, params: Params, batch: Batch, key: jax.Array | None) -> Any:
        """Returns the stream into the first block, and the context of all blocks."""
        params = self._gathered("embed", params)
        carry, context = self.stack.embed(params, batch, block_key(key, 0))
        return self._constrained(carry), context

    def _block(
        self, segment: int, params: Params, carry: Any, inputs: BlockInputs
    ) -> Any:
        """Returns stream and tiles' input after a block or trunk; auxiliary results."""
        params = self._gathered((segment, False), params)
        given = self._drawn(inputs, carry)
        stream, auxiliary = self._trunk(segment, params, carry, inputs.context, given)
        # The last result tells when the program has ended, after the stream was
        # donated.
        return self._constrained(stream), auxiliary, jnp.float32(0)

    def _block_saving(
        self, segment: int, params: Params, carry: Any, inputs: BlockInputs
    ) -> Any:
        """Returns the results of `_block`, and the residuals that the policy saves."""
        (stream, loss), pull, auxiliary, operands = self._vjp(
            segment, params, carry, inputs
        )
        _check_same_types(carry, stream[0])
        auxiliary = auxiliary._replace(loss=loss)
        results = self._constrained(stream), auxiliary, jnp.float32(0)
        return results, residuals_of(pull, operands)

    def _vjp(
        self, segment: int, params: Params, carry: Any, inputs: BlockInputs
    ) -> Any:
        """Returns `jax.vjp` of a block or trunk, auxiliary results, and operands.

        The primal outputs are the stream, with the input of tiles, and the auxiliary
        loss.
        """
        params = self._gathered((segment, False), params)
        context, given = inputs.context, self._drawn(inputs, carry)

        def run(params: Params, carry: Any) -> Any:
            stream, auxiliary = self._trunk(segment, params, carry, context, given)
            return (stream, auxiliary.loss), auxiliary._replace(loss=None)

        if self.policy:
            # Forward and backward run as separate programs: CSE cannot undo the
            # recomputation.
            run = jax.checkpoint(run, policy=self.policy, prevent_cse=False)
        run, learned = self._of_learned((segment, False), run, params)
        results = jax.vjp(run, learned, carry, has_aux=True)
        return *results, (params, context, given)

    def _tile(
        self,
        segment: int,
        params: Params,
        carry: Any,
        entering: Any,
        inputs: BlockInputs,
    ) -> tuple[Any, jax.Array]:
        """Adds the result of a tile to the stream."""
        params = self._gathered((segment, True), params)
        tiles = self._tiles_of(segment)
        added = tiles.tile(params, entering, inputs.unit_key)
        carry = jax.tree.map(tiles.add, carry, added)
        return self._constrained(carry), _number_of(carry)

    def _head(
        self,
        params: Params,
        carry: Any,
        batch: Batch,
        scale: jax.Array,
        auxiliaries: Sequence[Auxiliary],
    ) -> tuple[Loss, list[jax.Array], list[jax.Array], Any, jax.Array]:
        """Returns loss, gradients, cotangents of the stream and the auxiliary loss.

        Gradients of parameters that the head shares with the embedding are a separate
        list.
        """

        def scaled(params: Params, carry: Any) -> tuple[jax.Array, Any]:
            loss = self._mean_loss(params, carry, batch, auxiliaries)
            factor = scale * microbatches.counted(loss.weight)
            return loss.value * factor, (loss, factor)

        scaled, learned = self._of_learned(
            "head", scaled, self._gathered("head", params)
        )
        differentiate = jax.grad(scaled, argnums=(0, 1), has_aux=True)
        (grads, cotangent), (loss, auxiliary_cotangent) = differentiate(learned, carry)
        unshared, shared = [], []
        stored = self._stored("head", grads)
        for keys, grad in jax.tree_util.tree_leaves_with_path(stored):
            (shared if path_of(keys) in self.stack.shared else unshared).append(grad)
        return loss, unshared, shared, self._constrained(cotangent), auxiliary_cotangent

    def _head_loss(
        self, params: Params, carry: Any, batch: Batch, auxiliaries: Sequence[Auxiliary]
    ) -> Loss:
        """Returns the loss of a microbatch."""
        params = self._gathered("head", params)
        return self._mean_loss(params, carry, batch, auxiliaries)

    def _mean_loss(
        self, params: Params, carry: Any, batch: Batch, auxiliaries: Sequence[Auxiliary]
    ) -> Loss:
        """Returns the mean loss of a microbatch from stream and auxiliary results."""
        total, weight, sums = self.stack.head(params, carry, batch)
        totals = stack_totals(self.stack.segments, auxiliaries)
        loss = loss_of_sums(total, weight, sums, combine(auxiliaries), totals)
        return microbatches.check_names(loss)

    def _block_backward(
        self,
        segment: int,
        params: Params,
        saved: Any,
        inputs: BlockInputs,
        cotangent: Any,
        entering_cotangent: Any,
        auxiliary_cotangent: jax.Array,
    ) -> tuple[list[jax.Array], Any, jax.Array]:
        """Returns gradients of a block or trunk, and the cotangent of the input.

        `saved` is the block's input, or the residuals of `_block_saving`;
        `entering_cotangent` is the cotangent of the input of tiles.
        """
        # With residuals, zeros stand for the input: XLA drops what is computed from it.
        carry = jax.tree.map(jnp.zeros_like, cotangent) if self.policy else saved
        (_, loss), pull, _, operands = self._vjp(segment, params, carry, inputs)
        if self.policy:
            pull = vjp_with(saved, pull, operands)
        loss_cotangent = (
            None if loss is None else auxiliary_cotangent.astype(loss.dtype)
        )
        grads, cotangent = pull(((cotangent, entering_cotangent), loss_cotangent))
        stored = jax.tree.leaves(self._stored((segment, False), grads))
        return stored, self._constrained(cotangent), _number_of(cotangent)

    def _tile_backward(
        self,
        segment: int,
        params: Params,
        entering: Any,
        inputs: BlockInputs,
        cotangent: Any,
        entering_cotangent: Any,
    ) -> tuple[list[jax.Array], Any, jax.Array]:
        """Returns gradients of a tile, and the cotangent so far of the input of tiles.

        The stream has one cotangent before and after a tile, which only adds to the
        stream.
        """
        run_tile, unit_key = self._tiles_of(segment).tile, inputs.unit_key

        def run(params: Params, entering: Any) -> Any:
            return run_tile(params, entering, unit_key)

        params = self._gathered((segment, True), params)
        run, learned = self._of_learned((segment, True), run, params)
        _, pull = jax.vjp(run, learned, entering)
        grads, summand = pull(cotangent)
        total = jax.tree.map(jnp.add, entering_cotangent, summand)
        stored = jax.tree.leaves(self._stored((segment, True), grads))
        return stored, self._constrained(total), _number_of(total)

    def _embed_backward(
        self,
        params: Params,
        batch: Batch,
        key: jax.Array,
        cotangent: Any,
        shared: list[jax.Array],
    ) -> list[jax.Array]:
        """Returns gradients of the embedding, plus the head's for shared parameters."""

        def run(params: Params) -> Any:
            return self.stack.embed(params, batch, block_key(key, 0))[0]

        run, learned = self._of_learned("embed", run, self._gathered("embed", params))
        _, pull = jax.vjp(run, learned)
        (grads,) = pull(cotangent)
        stored = self._stored("embed", grads)
        head_grads = dict(zip(self._shared, shared, strict=True))
        return [
            grad + head_grads[path_of(keys)] if path_of(keys) in head_grads else grad
            for keys, grad in jax.tree_util.tree_leaves_with_path(stored)
        ]

    def _draw_layers(self, key: jax.Array, theta: jax.Array) -> jax.Array | None:
        """Draws whether each block runs, bool[blocks]."""
        numbers, dropping = range(self.num_blocks), Dropping(theta=theta)
        keys = jax.vmap(lambda i: block_key(key, i))(jnp.arange(len(numbers)) + 1)
        return make_inputs(keys, dropping, numbers, None).is_kept

    def _no_gradients(self, segment: int, params: Params) -> list[jax.Array]:
        """Returns zero gradients of a block that does not run."""
        params = self._gathered((segment, False), params)
        params = trained(params, self._masters[segment, False])
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.tree.leaves(self._stored((segment, False), zeros))

    def _no_results(self, segment: int, carry: Any, inputs: BlockInputs) -> Auxiliary:
        """Returns zero losses, metrics and totals of a block that does not run."""
        run = functools.partial(self._block, segment)
        params = abstract_tree(self._rows[segment, False])
        _, auxiliary, _ = jax.eval_shape(run, params, carry, inputs)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), auxiliary)

    def _span(self, dropping: Dropping, key: Any, carry: Any, context: Any) -> Any:
        """Draws the tokens of the span, and selects the span's part of the context."""
        # The key of the second block, as in a run without offload.
        return draw_span(self.stack, dropping, block_key(key, 2), carry, context)

    def _take(self, stream: Any, indices: jax.Array) -> Any:
        """Selects the tokens `indices` of a stream."""
        return self._constrained(
            jax.tree.map(lambda x: take_tokens(x, indices), stream)
        )

    def _replace(self, others: Any, subset: Any, indices: jax.Array) -> Any:
        """Puts a subset of the tokens back into the stream."""
        everything, _ = on_subset(lambda _: (subset, ()), others, indices)
        return self._constrained(everything)

    def _zeros_like(self, entering: Any) -> Any:
        return self._constrained(jax.tree.map(jnp.zeros_like, entering))

    def _drawn(self, inputs: BlockInputs, carry: Any) -> BlockInput:
        """Draws the tokens of a block that the host has drawn to run."""
        key, number, dropping = inputs.unit_key, inputs.number, inputs.dropping
        given = make_input(key, number, self.num_blocks, dropping, carry)
        return given._replace(is_kept=None)

    def _trunk(
        self, segment: int, params: Params, carry: Any, context: Any, given: BlockInput
    ) -> Any:
        """Runs a block or trunk; returns stream and tiles' input, and other results."""
        of_segment = self.stack.segments[segment]
        if of_segment.tiles is not None:
            # Models with tiles drop nothing.
            return of_segment.tiles.trunk(params, carry, context, given.key)
        block = block_on_tokens(self.stack, of_segment)
        carry, auxiliary = run_block(block, params, carry, context, given)
        return (carry, ()), auxiliary

    def _tiles_of(self, segment: int) -> Tiles:
        tiles = self.stack.segments[segment].tiles
        assert tiles is not None
        return tiles

    def _of_learned(
        self, part: Any, run: Callable[..., Any], params: Params
    ) -> tuple[Callable[..., Any], Params]:
        """Returns `run` as a function of trained parameters, with these."""
        rows = self._masters[part]

        def run_learned(learned: Params, *args: Any) -> Any:
            return run(joined(learned, params, rows), *args)

        return run_learned, trained(params, rows)

    def _gathered(self, part: Any, params: Params) -> Params:
        return gathered(params, self._rows[part])

    def _stored(self, part: Any, grads: Params) -> Params:
        """Converts gradients to stored shapes, dtypes and shards."""
        rows = self._grad_rows[part]
        return pad_tree(place_tree(cast_like(grads, rows), rows), rows)

    def _constrained(self, carry: Any) -> Any:
        """Shards a stream as the batch is."""
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, self.plan.batch_sharding(x)),
            carry,
        )


def _check_same_types(entering: Any, leaving: Any) -> None:
    """Raises PlanError if a block changes the types of the stream.

    The backward program makes zeros of the input from the cotangent of the output.
    """
    types = [
        [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
        for tree in (entering, leaving)
    ]
    if types[0] != types[1]:
        problem = f"enters a block as {' '.join(types[0])}"
        remedy = "have embedding and blocks agree, or leave Model.keeps out"
        raise PlanError(Problem("stream", " ".join(types[1]), problem, remedy))


def _number_of(stream: Any) -> jax.Array:
    """Returns one number of a stream, to tell when the program has ended."""
    return jax.tree.leaves(stream)[0].ravel()[0]
