"""A backward pass that yields gradients unit by unit, as soon as they exist.

The model runs as compiled programs of one transfer unit each, called from Python.
Between the passes the residuals of each block are stored, by default the block's input:
the backward program of a block computes the block again (ZeRO-Infinity,
arXiv:2104.07857, section 5.1.3).
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax

from zjax.errors import PlanError, Problem
from zjax.offload import units as transfer_units
from zjax.offload.compiled import Jit, Peak
from zjax.offload.gradients import (
    GradientSums,
    GroupGradients,
    input_plan,
    saving_policy,
)
from zjax.offload.programs import BlockInputs, BlockPrograms
from zjax.offload.route import Route
from zjax.offload.shapes import PassShapes
from zjax.offload.stream import Load, Stream, moved_bytes
from zjax.offload.units import (
    Unit,
    UnitStream,
    check_frozen_alike,
    groups_of,
    units_of,
)
from zjax.settings.schema import Model as Shape
from zjax.settings.schema import Zero
from zjax.sharding.memory import bytes_by_memory, tree_bytes
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST, Plan
from zjax.sharding.roles import trained
from zjax.train.partition import check_no_model_state
from zjax.train.state import TrainState, stored_compute
from zjax.train.update import loss_scale_of
from zjax.typing import (
    NOTHING_DROPPED,
    Auxiliary,
    Batch,
    Dropping,
    Loss,
    Metrics,
    Model,
    Params,
    StepBatch,
)


class BlockwiseBackward:
    """Gradients of a model's stack by transfer unit; see `Backward`.

    Raises PlanError if the model has a state, which no stack updates.

    Raises:
        PlanError: The stack would leave a model state as it starts.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        zero: Zero,
        shape: Shape,
        num_microbatches: int,
        jit: Jit,
    ):
        assert model.stack is not None
        where = zero.optimizer_memory
        check_no_model_state(plan, "zero.offload", where, DEVICE)
        self.stack, self.entries = model.stack, model.entries
        self.plan = plan
        self.inputs_rest = shape.activation_memory, zero.placement.nvme_paths
        self.num_microbatches = num_microbatches
        policy = saving_policy(model, shape)
        self.programs = BlockPrograms(model, plan, num_microbatches, policy, jit)
        self.grad_rows = self.programs.grad_rows
        self.units = UnitStream(self.stack, plan)
        check_frozen_alike(self.stack, plan.master)
        rows = jax.tree.leaves(plan.master)
        groups = zip(groups_of(self.stack, plan.master), rows, strict=True)
        self.groups = [group for group, row in groups if not row.is_frozen]
        self.masters = [tree for _, tree in units_of(self.stack, plan.master)]
        embed = len(self.units.units)
        # The head first, the units backwards, the embedding last: the order of arrival.
        self.order = [embed + 1, *reversed(range(embed)), embed]
        self.saved = Stream(transfer_units.AHEAD_BYTES)
        self.residual_bytes = 0
        unit_bytes = max(map(tree_bytes, self.units.rows))
        self.sums = GradientSums(
            self.groups,
            self.grad_rows,
            zero,
            num_microbatches,
            num_groups=len(self.order),
            limit_bytes=max(3 * unit_bytes, transfer_units.AHEAD_BYTES),
            jit=jit,
        )

    def run(
        self, state: TrainState, step: StepBatch, key: jax.Array
    ) -> Iterator[GroupGradients | Loss]:
        """Yields gradients in `order`, then the loss; see `Backward`."""
        params, scale = stored_compute(state, self.plan), loss_scale_of(state)
        losses: list[Loss] = []
        sums: dict[int, list[Any]] = {}
        for number in range(self.num_microbatches):
            part = self.programs.split_batch(step.batch, number)
            microbatch_key = jax.random.fold_in(key, number)
            arriving = self.differentiate(
                params, part, microbatch_key, scale, step.dropping
            )
            # The loss comes first: the last microbatch needs all weights for the means.
            losses.append(next(arriving))
            if self.num_microbatches == 1:
                yield from arriving
            else:
                weights = [loss.weight for loss in losses]
                yield from self.sums.add(sums, arriving, weights)
        yield self.sums.mean_loss(losses)._replace(model_state=state.model_state)

    def differentiate(
        self,
        params: Params,
        batch: Batch,
        key: jax.Array,
        scale: jax.Array,
        dropping: Dropping,
    ) -> Iterator[Any]:
        """Yields the loss of one microbatch, then gradients by group."""
        programs = self.programs
        embed, _, head = self.stack.split(params)
        stored = self.units.stored(params)
        self.saved.prefetch(())  # drops what a failed pass left
        route = Route(programs, key, dropping)
        forward = [
            ("forward", x.number) for x in self.units.units if route.runs(x.block)
        ]
        backward = [("backward", i) for i in range(len(stored))[::-1]]
        self.units.stream.prefetch(self.units.loads(stored, [*forward, *backward]))
        saved: dict[int, tuple[Load, Any]] = {}
        carry, auxiliaries = self.forward(embed, stored, batch, key, route, saved)
        self.residual_bytes = sum(
            bytes_by_memory(load.rows).device for load, _ in saved.values()
        )
        loss, head_grads, shared, cotangent, auxiliary_cotangent = programs.head(
            head, carry, batch, scale, auxiliaries
        )
        del carry
        yield loss
        yield GroupGradients(len(stored) + 1, head_grads)
        trees = {i: tree for i, (_, tree) in saved.items()}
        # Popped, so that the stream alone holds the residuals and frees each after use.
        self.saved.prefetch(saved.pop(i)[0] for i in [*saved][::-1])
        for i in reversed(range(len(self.units.blocks))):
            cotangent = route.narrow(cotangent) if i == route.last else cotangent
            # A block that did not run saved nothing.
            if i in trees:
                inputs = route.inputs_of(i)
                cotangent = yield from self.block_backward(
                    stored, inputs, trees[i], cotangent, auxiliary_cotangent
                )
            else:
                yield from self.skipped_backward(stored, i)
            cotangent = route.widen(cotangent) if i == route.first else cotangent
        embed_grads = programs.embed_backward(embed, batch, key, cotangent, shared)
        yield GroupGradients(len(stored), embed_grads)

    def block_backward(
        self,
        stored: Sequence[Params],
        inputs: BlockInputs,
        tree: Any,
        cotangent: Any,
        auxiliary_cotangent: jax.Array,
    ) -> Generator[GroupGradients, None, Any]:
        """Yields gradients of a block by group; returns the input's cotangent."""
        leaves, num_bytes = self.saved.wait(inputs.number)
        saved, entering = tree.unflatten(leaves)
        # Each `del` lets a program donate or free memory while the generator is
        # suspended.
        del leaves
        trunk, *tiles = self.units.blocks[inputs.number]
        entering_cotangent = jax.tree.map(self.programs.zeros_like, entering)
        for tile in reversed(tiles):
            with self.units.on_device(stored, "backward", tile) as (params, used):
                grads, entering_cotangent, done = self.programs.tile_backward(
                    tile.segment,
                    params,
                    entering,
                    inputs,
                    cotangent,
                    entering_cotangent,
                )
                used.append(done)
                yield self.gradients_of(tile, grads, params)
        del entering
        with self.units.on_device(stored, "backward", trunk) as (params, used):
            grads, cotangent, done = self.programs.block_backward(
                trunk.segment,
                params,
                saved,
                inputs,
                cotangent,
                entering_cotangent,
                auxiliary_cotangent,
            )
            del saved
            used.append(done)
            self.saved.release(num_bytes, [done])
            yield self.gradients_of(trunk, grads, params)
        return cotangent

    def skipped_backward(
        self, stored: Sequence[Params], block: int
    ) -> Iterator[GroupGradients]:
        """Yields zeros for a dropped block: updates still read the parameters."""
        for unit in reversed(self.units.blocks[block]):
            with self.units.on_device(stored, "backward", unit) as (params, used):
                grads = self.programs.no_gradients(unit.segment, params)
                used.extend(grads[:1])
                yield self.gradients_of(unit, grads, params)

    def gradients_of(
        self, unit: Unit, grads: list[jax.Array], params: Params
    ) -> GroupGradients:
        """Pairs gradients of a unit with the parameters that an update reads."""
        learned = jax.tree.leaves(trained(params, self.masters[unit.number]))
        return GroupGradients(unit.number, grads, learned)

    def forward(
        self,
        embed: Params,
        stored: Sequence[Params],
        batch: Batch,
        key: jax.Array | None,
        route: Route,
        saved: dict[int, tuple[Load, Any]] | None = None,
    ) -> tuple[Any, list[Auxiliary]]:
        """Returns the stream after the last block, and auxiliary results of each block.

        Stored residuals of each block are added to `saved`, if given.
        """
        carry, context = self.programs.embed(embed, batch, key)
        route.start(carry, context)
        auxiliaries: list[Auxiliary] = []
        for number, (trunk, *tiles) in enumerate(self.units.blocks):
            carry = route.narrow(carry) if number == route.first else carry
            inputs = route.inputs_of(number)
            if route.runs(number):
                with self.units.on_device(stored, "forward", trunk) as (params, used):
                    results, residuals = self.trunk_forward(
                        trunk, params, carry, inputs, saved
                    )
                    (carry, entering), auxiliary, done = results
                    del results
                    used.append(done)
                for tile in tiles:
                    with self.units.on_device(stored, "forward", tile) as (
                        params,
                        used,
                    ):
                        carry, done = self.programs.tile(
                            tile.segment, params, carry, entering, inputs
                        )
                        used.append(done)
                if saved is not None:
                    saved[number] = self.save(number, residuals, entering)
                del residuals, entering
            else:
                auxiliary = self.programs.no_results(trunk.segment, carry, inputs)
            auxiliaries.append(auxiliary)
            carry = route.widen(carry) if number == route.last else carry
        return carry, auxiliaries

    def trunk_forward(
        self,
        trunk: Unit,
        params: Params,
        carry: Any,
        inputs: BlockInputs,
        saved: dict[int, tuple[Load, Any]] | None,
    ) -> tuple[Any, Any]:
        """Runs a block or trunk; returns results and residuals, or the input."""
        if saved is None or self.programs.block_saving is None:
            results = self.programs.block(trunk.segment, params, carry, inputs)
            return results, carry
        return self.programs.block_saving(trunk.segment, params, carry, inputs)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Returns loss and metrics without gradients or dropout, as float32 scalars."""
        params = stored_compute(state, self.plan)
        embed, _, head = self.stack.split(params)
        stored, losses = self.units.stored(params), []
        for number in range(self.num_microbatches):
            part = self.programs.split_batch(batch, number)
            names = [("forward", i) for i in range(len(stored))]
            self.units.stream.prefetch(self.units.loads(stored, names))
            route = Route(self.programs, None, NOTHING_DROPPED)
            carry, auxiliaries = self.forward(embed, stored, part, None, route)
            losses.append(self.programs.head_loss(head, carry, part, auxiliaries))
        loss = self.sums.mean_loss(losses)
        return loss.metrics | {"loss": loss.value, "weight": loss.weight}

    def save(self, block: int, residuals: Any, entering: Any) -> tuple[Load, Any]:
        """Stores residuals and the input of tiles; returns the load and the tree."""
        arrays, tree = jax.tree.flatten((residuals, entering))
        rows = self.saved_rows(residuals, entering)
        stored = self.saved.write_back(arrays, rows)
        return Load(block, stored, rows, is_consumed=True), tree

    def saved_rows(self, residuals: Any, entering: Any) -> list[ArrayPlan]:
        """Plans the storage of `save`; residuals stay where computed."""
        stores = self._input_row if self.programs.policy is None else self._residual_row
        return [
            *map(stores, jax.tree.leaves(residuals)),
            *map(self._input_row, jax.tree.leaves(entering)),
        ]

    def _input_row(self, x: Any) -> ArrayPlan:
        return input_plan(x, self.plan, *self.inputs_rest)

    def _residual_row(self, x: Any) -> ArrayPlan:
        """Plans a residual on one device; raises PlanError if it is offloaded."""
        if x.sharding.memory_kind == HOST:
            problem = "offloads residuals of blocks"
            remedy = "save them, or set model.activation_memory to offload inputs alone"
            raise PlanError(Problem("keeps", HOST, problem, remedy))
        shape, place = x.sharding.shard_shape(x.shape), self.plan.replicated
        return ArrayPlan("a residual of a block", shape, x.dtype, place, place)

    def moments(self, state: TrainState, step: StepBatch, pending: Any) -> list[Peak]:
        """Predicts the bytes of each program of the pass; see `Backward`."""
        shapes = PassShapes(self.programs, self.units, self.saved_rows, step.batch)
        programs = shapes.bytes
        saved = bytes_by_memory(shapes.saved).device
        gradients = pending(saved)
        sums = self.sums.rows if self.num_microbatches > 1 else []
        always = {
            "sums of gradients": sum(bytes_by_memory(rows).device for rows in sums)
            + self.sums.stream.most_bytes([*map(moved_bytes, sums)]),
            "inputs in transfer": self.saved.most_bytes([moved_bytes(shapes.saved)]),
        }
        loads = [*map(moved_bytes, self.units.rows)]
        units = {"prefetched blocks": self.units.stream.most_bytes(loads)}
        # Gradients replace residuals block by block; those of the head exist before.
        first = min(gradients, tree_bytes(self.sums.rows[self.order[0]]))
        turned = max(saved + first, gradients) + shapes.stream
        then = "residuals, then gradients"
        parts = {
            "forward": units | {"residuals": saved},
            "head": units | {"residuals": saved + shapes.carry},
            "backward": units | {then: turned},
            "embedding, backward": {"gradients": gradients + shapes.carry},
            "tile": units | {"residuals": saved + shapes.stream},
            "tile, backward": units | {then: turned},
        }
        return [
            *(
                Peak(name, always | sizes | {"program": programs[name]})
                for name, sizes in parts.items()
                if name in programs
            ),
            Peak("update", always | {"gradients": gradients}),
        ]
