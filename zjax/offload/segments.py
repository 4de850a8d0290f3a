"""A backward pass that hands over the gradients of each block as soon as they exist.

The model runs as compiled programs of one block each, called from Python. Between them
the input of every block is kept, and the backward program of a block computes the block
again; or what a policy names, and it computes the rest. Where a block has tiles, its
trunk and each tile are programs of their own, and what the tiles read is kept too
(ZeRO-Infinity, arXiv:2104.07857, section 5.1.3).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zjax.errors import PlanError, Problem
from zjax.offload import blocks
from zjax.offload.blocks import BlockStream
from zjax.offload.parts import Jit
from zjax.offload.programs import BlockPrograms
from zjax.offload.stream import Load, Stream
from zjax.offload.units import groups_of
from zjax.sharding.in_use import plan_on_device
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST, Plan
from zjax.storage.move import rest
from zjax.train.gradients import weighting
from zjax.train.state import TrainState
from zjax.train.update import loss_scale_of
from zjax.typing import Auxiliary, Batch, Loss, Metrics, Model, Params


class Arrived(NamedTuple):
    """What a backward pass hands over.

    Args:
        group: Of parameters.
        grads: In the order of its leaves.
        params: In the same order, on the devices until the next group is asked for;
            empty for what is no part of a block.
    """

    group: int
    grads: list[jax.Array]
    params: Sequence[jax.Array] = ()


class Segments:
    """The programs of a model's stack.

    Blocks come up whole, or, where they have tiles, unit by unit; groups of parameters
    are those of `groups_of`.

    Args:
        model: It has a stack and takes its layers apart.
        plan: Places parameters and gradients.
        num_microbatches: Parts of the batch that follow one another.
        jit: Compiles.
        input_at_rest: Where what enters a block rests until the backward pass.
        sum_at_rest: Where a sum of gradients rests until the next microbatch, by its
            place on the devices.
        keeps: What a block leaves to its backward pass, as a policy of `jax.checkpoint`
            whose choice stays on the devices; None leaves what enters it.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        num_microbatches: int,
        jit: Jit,
        *,
        input_at_rest: Callable[[jax.Array], ArrayPlan],
        sum_at_rest: Callable[[ArrayPlan], ArrayPlan],
        keeps: Callable[..., Any] | None = None,
    ):
        assert model.stack is not None
        self.stack = model.stack
        self.plan = plan
        self.num_microbatches = num_microbatches
        on_device = plan_on_device(plan)
        programs = BlockPrograms(model, on_device, num_microbatches, keeps)
        self.blocks = BlockStream(self.stack, plan)
        unit_rows = self.blocks.unit_rows
        unit_bytes = max(sum(x.device_bytes for x in rows) for rows in unit_rows)
        self.carries = Stream(blocks.AHEAD_BYTES)
        self.input_at_rest = input_at_rest
        self.kept_bytes = 0  # by all blocks on a device, at the last pass
        self.sums = Stream(max(3 * unit_bytes, blocks.AHEAD_BYTES))
        self.sum_rows = [
            [sum_at_rest(row) for row in rows] for rows in programs.rows_by_group()
        ]
        self.grad_rows = programs.grad_tree
        self.embed = jit(programs.embed)
        self.block = jit(programs.block, static_argnums=0)
        kept = jit(programs.block_kept, static_argnums=0)
        self.block_kept = kept if keeps else None
        self.tile = jit(programs.tile, static_argnums=0, donate_argnums=2)
        self.head = jit(programs.head)
        self.head_loss = jit(programs.head_loss)
        backward = {"static_argnums": 0, "donate_argnums": 6}
        self.block_backward = jit(programs.block_backward, **backward)
        self.tile_backward = jit(programs.tile_backward, **backward)
        self.embed_backward = jit(programs.embed_backward)
        self.no_cotangent = jit(programs.no_cotangent)
        self.scale_by = jit(_scaled)
        self.add = jit(_add, donate_argnums=0)
        self.mean = jit(_mean, donate_argnums=0)
        self.mean_loss = jit(_mean_loss)
        self.split = jit(programs.split_batch, static_argnums=1)

    @property
    def order(self) -> list[int]:
        """The groups as their gradients arrive."""
        embed = len(self.blocks.unit_rows)
        return [embed + 1, *reversed(range(embed)), embed]

    def groups(self) -> list[int]:
        """The group of each leaf of the parameters, in their order."""
        return groups_of(self.stack, self.plan.master)

    def run(
        self, state: TrainState, batch: Batch, key: jax.Array
    ) -> Iterator[Arrived | Loss]:
        """Differentiates the mean loss over a batch.

        Args:
            state: Its parameters in use and its loss scale are read.
            batch: Placed arrays of the global batch.
            key: Of the step.

        Yields:
            Gradients by group, in `order` and as they are stored, and at the end the
            loss.
        """
        params, scale = state.params, loss_scale_of(state)
        losses: list[Loss] = []
        totals: dict[int, Any] = {}
        last = self.num_microbatches - 1
        for number in range(self.num_microbatches):
            part = self.split(batch, number)
            microbatch_key = jax.random.fold_in(key, number)
            arriving = self.differentiate(params, part, microbatch_key, scale)
            losses.append(next(arriving))
            if self.num_microbatches == 1:
                yield from arriving
                break
            weights = [loss.weight for loss in losses]
            for arrived in self.added(totals, arriving, weights):
                if number == last:
                    yield arrived
                else:
                    totals[arrived.group] = arrived.grads
        yield self.mean_loss(losses)._replace(model_state=state.model_state)

    def added(
        self,
        totals: dict[int, Any],
        arriving: Iterator[Arrived],
        weights: list[jax.Array],
    ) -> Iterator[Arrived]:
        """Sums of gradients so far, at rest; at the end their means, on the devices."""
        announced = [group for group in self.order if group in totals]
        self.sums.begin(
            Load(group, totals.pop(group), self.sum_rows[group], is_consumed=True)
            for group in announced
        )
        for group, grads, params in arriving:
            if not announced:
                total = self.scale_by(grads, weights[0])
                yield Arrived(group, rest(total, self.sum_rows[group]))
                continue
            total, num_bytes = self.sums.take(group)
            total = self.add(total, grads, weights[-1])
            if len(weights) == self.num_microbatches:
                total = self.mean(total, weights)
            else:
                total = rest(total, self.sum_rows[group])
            self.sums.leave(num_bytes, total)
            yield Arrived(group, total, params)

    def differentiate(
        self, params: Params, batch: Batch, key: jax.Array, scale: jax.Array
    ) -> Iterator[Any]:
        """One microbatch: its loss, then gradients by group."""
        embed, _, head = self.stack.split(params)
        units = self.blocks.units(params)
        self.carries.begin(())  # and forget those of a pass that failed
        back = range(len(self.blocks.units_of_block))[::-1]
        kept: list[Any] = []
        there = [("forward", i) for i in range(len(units))]
        self.blocks.announce(
            units, [*there, *(("backward", i) for _, i in there[::-1])]
        )
        carry, context, given = self.forward(embed, units, batch, key, kept)
        rows = [row for _, rows in kept for row in jax.tree.leaves(rows)]
        here = [row for row in rows if row.memory == DEVICE]
        self.kept_bytes = sum(row.device_bytes for row in here)
        found = self.head(head, carry, batch, scale, given)
        loss, own, shared, cotangent, of_auxiliary = found
        del carry, found
        yield loss
        yield Arrived(len(units) + 1, own)
        trees = [jax.tree.structure(rows) for _, rows in kept]
        self.carries.begin(
            Load(i, leaves, jax.tree.leaves(rows), is_consumed=True)
            for i, (leaves, rows) in ((i, kept.pop()) for i in back)
        )
        for i in back:
            reads = (trees[i], context, key, of_auxiliary)
            cotangent = yield from self.block_back(units, i, cotangent, *reads)
        own = self.embed_backward(embed, batch, key, cotangent, shared)
        yield Arrived(len(units), own)

    def block_back(
        self,
        units: Sequence[Params],
        number: int,
        cotangent: Any,
        tree: Any,
        context: Any,
        key: jax.Array,
        of_auxiliary: jax.Array,
    ) -> Generator[Arrived, None, Any]:
        """Gradients of a block by group; returns that of what entered it."""
        segment = self.blocks.segment_by_block[number]
        leaves, num_bytes = self.carries.take(number)
        left, for_tiles = tree.unflatten(leaves)
        del leaves
        trunk, *tiles = self.blocks.units_of_block[number]
        of_read = jax.tree.map(self.no_cotangent, for_tiles)
        for group in reversed(tiles):
            with self.blocks.fetched(units, ("backward", group)) as (tile, tokens):
                inputs = (tile, for_tiles, key, number, cotangent, of_read)
                results = self.tile_backward(segment, *inputs)
                grads, of_read, done = results
                tokens.append(done)
                del inputs, results
                yield Arrived(group, grads, jax.tree.leaves(tile))
        del for_tiles
        with self.blocks.fetched(units, ("backward", trunk)) as (block, tokens):
            inputs = (block, left, context, key, number)
            del left
            of_results = (cotangent, of_read, of_auxiliary)
            results = self.block_backward(segment, *inputs, *of_results)
            del of_results
            grads, cotangent, done = results
            tokens.append(done)
            del inputs, results
            self.carries.leave(num_bytes, [done])
            yield Arrived(trunk, grads, jax.tree.leaves(block))
        return cotangent

    def forward(
        self,
        embed: Params,
        units: Sequence[Params],
        batch: Batch,
        key: jax.Array | None,
        kept: list[Any] | None = None,
    ) -> tuple[Any, Any, list[Auxiliary]]:
        """The stream after the last block, the context, and what blocks give besides.

        What each block leaves to the backward pass goes to `kept`.
        """
        carry, context = self.embed(embed, batch, key)
        given: list[Auxiliary] = []
        for number, segment in enumerate(self.blocks.segment_by_block):
            entering = carry
            trunk, *tiles = self.blocks.units_of_block[number]
            with self.blocks.fetched(units, ("forward", trunk)) as (block, tokens):
                inputs = (segment, block, entering, context, key, number)
                if kept is None or self.block_kept is None:
                    results, left = self.block(*inputs), entering
                else:
                    results, left = self.block_kept(*inputs)
                (carry, for_tiles), own, done = results
                del inputs, entering, results
                given.append(own)
                tokens.append(done)
            for group in tiles:
                with self.blocks.fetched(units, ("forward", group)) as (tile, tokens):
                    inputs = (segment, tile, carry, for_tiles, key, number)
                    carry, done = self.tile(*inputs)
                    del inputs
                    tokens.append(done)
            if kept is not None:
                kept.append(self.put_away(left, for_tiles))
        return carry, context, given

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Loss and metrics without gradients, dropout or state change.

        Args:
            state: Its parameters in use are read.
            batch: Placed arrays of the global batch.

        Returns:
            float32 scalars.
        """
        embed, _, head = self.stack.split(state.params)
        units, losses = self.blocks.units(state.params), []
        for number in range(self.num_microbatches):
            part = self.split(batch, number)
            self.blocks.announce(units, [("forward", i) for i in range(len(units))])
            carry, _, given = self.forward(embed, units, part, None)
            losses.append(self.head_loss(head, carry, part, given))
        loss = self.mean_loss(losses)
        return loss.metrics | {"loss": loss.value, "weight": loss.weight}

    def put_away(self, left: Any, for_tiles: Any) -> tuple[list[Any], Any]:
        """What a block leaves, and what enters its tiles, until the backward pass."""
        arrays, rows = (left, for_tiles), self.rows_kept(left, for_tiles)
        return self.carries.send(*map(jax.tree.leaves, (arrays, rows))), rows

    def rows_kept(self, left: Any, for_tiles: Any) -> Any:
        """Where those rest; what a policy keeps stays where its program put it."""
        at_rest = self.input_at_rest if self.block_kept is None else self.shard_of
        return (
            jax.tree.map(at_rest, left),
            jax.tree.map(self.input_at_rest, for_tiles),
        )

    def shard_of(self, x: Any) -> ArrayPlan:
        """One device's part of an array that its program has placed."""
        if x.sharding.memory_kind == HOST:
            problem = "sends what a block keeps to the host"
            remedy = "have it stay, or set model.activation_memory to send inputs alone"
            raise PlanError(Problem("keeps", HOST, problem, remedy))
        shape, place = x.sharding.shard_shape(x.shape), self.plan.replicated
        return ArrayPlan("what a block keeps", shape, x.dtype, place, place)


def _scaled(grads: Params, weight: jax.Array) -> Params:
    return jax.tree.map(lambda g: weighting.scaled(g, weight), grads)


def _add(total: Params, grads: Params, weight: jax.Array) -> Params:
    return jax.tree.map(jnp.add, total, _scaled(grads, weight))


def _mean(total: Params, weights: list[jax.Array]) -> Params:
    whole = sum(weights)
    return _scaled(total, 1 / jnp.where(whole == 0, 1, whole))


def _mean_loss(losses: list[Loss]) -> Loss:
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *losses)
    return weighting.mean_loss(stacked, ())
