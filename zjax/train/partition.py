"""A model partitioned into embedding, blocks and head, and totals of blocks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zjax.errors import PlanError, Problem
from zjax.parallel.block_passes import without_params
from zjax.parallel.pipeline import StackTree
from zjax.sharding.layers import Layers
from zjax.sharding.mesh import PIPELINE
from zjax.sharding.naming import name_of
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import Plan
from zjax.typing import Batch, Model, Params, Segment, Totals


class StagePartition:
    """Splits trees of a model into embedding, the blocks of each segment, and head.

    Raises:
        PlanError: The model is not a line of blocks with stacked arrays, or the stack
            does more than select leaves and put leaves back.
    """

    def __init__(self, model: Model, plan: Plan):
        stack = model.stack
        if stack is None:
            raise PlanError(_no_line(plan, "a model that is no line of blocks"))
        self.plan, self.stack = plan, stack
        self.rows = plan.master
        paths = [row.path for row in jax.tree.leaves(plan.master)]
        _, self.blocks, _ = self._selected(plan.master)
        self.index = {path: number for number, path in enumerate(paths)}
        for segment, blocks in zip(stack.segments, self.blocks, strict=True):
            stacks = jax.tree.leaves(blocks, is_leaf=_is_layers)
            if not all(_is_stack(x, segment.num_blocks) for x in stacks):
                problem = "blocks whose arrays do not stack them"
                raise PlanError(_no_line(plan, problem))
        arrays = jax.tree.map(
            lambda row: jax.ShapeDtypeStruct(row.stored_shape, row.stored_dtype),
            plan.master,
        )
        # A user's `split` or `join` that computes would silently change the model.
        if jax.eval_shape(lambda tree: self.join(self.split(tree)), arrays) != arrays:
            problem = "does not put back what Stack.split selects"
            raise PlanError(_no_selection(plan, "join", problem))

    def split(self, tree: Any) -> StackTree:
        """Selects the leaves of the embedding, of each segment, and of the head.

        None may stand for the gradient of a frozen parameter.
        """
        leaves = jax.tree.leaves(tree, is_leaf=_is_none)
        embed, _, head = self._selected(tree)
        stages = jax.tree.map(
            lambda marks: leaves[self.index[marks[0].path]],
            self.blocks,
            is_leaf=_is_layers,
        )
        return StackTree(embed, stages, head)

    def join(self, parts: StackTree) -> Any:
        """Joins the results of `split`, adding up leaves that embedding and head share.

        A leaf that is None is 0 in the result.
        """
        stacks = jax.tree.leaves(self.blocks, is_leaf=_is_layers)
        parts = jax.tree.map(lambda x: 0 if x is None else x, parts, is_leaf=_is_none)
        pairs = zip(stacks, jax.tree.leaves(parts.stages), strict=True)
        stacked = {marks[0].path: x for marks, x in pairs}
        try:
            joined = self.stack.join(parts.embed, self.blocks, parts.head)
        except Exception as error:  # the function is the user's, and may raise anything
            problem = f"fails with {type(error).__name__} on layers that are no arrays"
            raise PlanError(_no_selection(self.plan, "join", problem)) from error

        def is_marked(x: Any) -> bool:
            return isinstance(x, Layers) and isinstance(x[0], _Mark)

        return jax.tree.map(
            lambda x: stacked[x[0].path] if is_marked(x) else x,
            joined,
            is_leaf=is_marked,
        )

    def check_context(self, batch: Batch) -> None:
        """Raises PlanError if the context, which has no gradient, needs parameters."""
        embed = _shapes(self.split(self.plan.compute).embed)
        if without_params(lambda *x: self._embedded(*x)[1], embed, batch) is None:
            problem = "gives no gradient to parameters that the context follows from"
            remedy = "use 1, or have Stack.embed put what does into the carry"
            raise PlanError(_of_size(self.plan, problem, remedy))

    def weights(self, parts: Batch) -> jax.Array:
        """Returns the weights of microbatches, float32[microbatches], before any pass.

        Raises PlanError if a weight depends on more than the batch.
        """
        rows = self.split(self.plan.compute)
        embed, head = _shapes(rows.embed), _shapes(rows.head)
        first = jax.tree.map(lambda x: x[0], parts)
        carry, _ = jax.eval_shape(self._embedded, embed, first)

        def weight(inputs: Any, batch: Batch) -> jax.Array:
            return jnp.asarray(self.stack.head(*inputs, batch)[1], jnp.float32)

        weigh = without_params(weight, (head, carry), first)
        if weigh is None:
            problem = "needs weights that follow from the batch alone"
            remedy = "use 1, or have Stack.head compute its weight from nothing else"
            raise PlanError(_of_size(self.plan, problem, remedy))
        return jax.vmap(weigh)(parts)

    def _embedded(self, params: Params, batch: Batch) -> tuple[Any, Any]:
        return self.stack.embed(params, batch, None)

    def _selected(self, tree: Any) -> tuple[Any, tuple[Any, ...], Any]:
        """Calls `Stack.split` on a tree with stacked arrays marked by layer."""
        try:
            embed, blocks, head = self.stack.split(self._marked(tree))
            pairs = zip(self.stack.segments, blocks, strict=True)
            return embed, tuple(each for _, each in pairs), head
        except Exception as error:  # the function is the user's, and may raise anything
            problem = f"fails with {type(error).__name__} on leaves that are no arrays"
            raise PlanError(_no_selection(self.plan, "split", problem)) from error

    def _marked(self, tree: Any) -> Any:
        """Replaces each stacked array by one marker per layer."""

        def one(row: ArrayPlan, x: Any) -> Any:
            if not row.num_layers:
                return x
            marks = (_Mark(row.path, layer) for layer in range(row.num_layers))
            return Layers(marks, name_of(row.path))

        return jax.tree.map(one, self.rows, tree)


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Stands for one layer of a stacked array in `Stack.split` and `Stack.join`."""

    path: str
    layer: int


def _is_none(x: Any) -> bool:
    return x is None


def _is_layers(x: Any) -> bool:
    return isinstance(x, Layers)


def _is_stack(x: Any, num_blocks: int) -> bool:
    """Whether `x` has all layers of one array, in order."""
    return (
        _is_layers(x)
        and len(x) == num_blocks
        and all(isinstance(mark, _Mark) for mark in x)
        and [mark.layer for mark in x] == list(range(num_blocks))
    )


def _shapes(rows: Any) -> Any:
    return jax.tree.map(lambda row: jax.ShapeDtypeStruct(row.shape, row.dtype), rows)


def _of_size(plan: Plan, problem: str, remedy: str) -> Problem:
    return Problem("mesh.pipeline", plan.mesh.shape[PIPELINE], problem, remedy)


def _no_line(plan: Plan, what: str) -> Problem:
    remedy = "use 1, or a model with a zjax.Stack"
    return _of_size(plan, f"cannot cut {what}", remedy)


def _no_selection(plan: Plan, function: str, what: str) -> Problem:
    """Describes a user's `split` or `join` that computes or fails."""
    remedy = {
        "split": "let it select leaves alone",
        "join": "let it put leaves back",
    }[function]
    problem = f"cannot cut a model whose Stack.{function} {what}"
    return _of_size(plan, problem, f"{remedy}, or use 1")


def check_no_model_state(plan: Plan, field: str, value: Any, instead: Any) -> None:
    """Raises PlanError if the model has a state, which a stack would never update.

    `field=value` is the setting that runs the stack; `instead` is a value that runs the
    loss.
    """
    paths = ", ".join(row.path for row in jax.tree.leaves(plan.model_state))
    if paths:
        problem = f"never updates the model state {paths}, which no Stack takes"
        remedy = f"use {instead!r}, or a model without model state"
        raise PlanError(Problem(field, value, problem, remedy))


class Bits(NamedTuple):
    """Halves of an int32 array, in float32, which holds 16 bits exactly.

    The stream of a pipeline holds floats alone.
    """

    high: jax.Array
    low: jax.Array


Stacks = tuple[dict[str, Bits], ...]
"""For each segment, arrays [num_blocks, ...] by name."""


def no_totals(segments: Sequence[Segment]) -> Stacks:
    """Returns zeros for all blocks of a stack."""

    def zeros(segment: Segment, shape: tuple[int, ...]) -> Bits:
        stack = jnp.zeros((segment.num_blocks, *shape), jnp.float32)
        return Bits(stack, stack)

    return tuple(
        {name: zeros(segment, shape) for name, shape in segment.totals.items()}
        for segment in segments
    )


def with_block(
    stacks: Stacks, segment: int, index: jax.Array, totals: Mapping[str, jax.Array]
) -> Stacks:
    """Writes the totals of block `index`, int32[], of a segment."""

    def write(stack: jax.Array, x: jax.Array) -> jax.Array:
        # Totals are counts: without a gradient, the backward pass drops them.
        stack = jax.lax.stop_gradient(stack)
        x = x.astype(jnp.float32)
        return jax.lax.dynamic_update_index_in_dim(stack, x, index, 0)

    written = {
        # An arithmetic shift: `high` has the sign, `low` is 0 to 65535.
        name: jax.tree.map(write, stacks[segment][name], Bits(x >> 16, x & 0xFFFF))
        for name, x in totals.items()
    }
    return (*stacks[:segment], written, *stacks[segment + 1 :])


def as_integers(stacks: Stacks) -> Totals:
    """Joins the halves of all totals to int32.

    Example:
        >>> segment = Segment(lambda *inputs: None, 2, totals={"load": ()})
        >>> zeros, large = no_totals([segment]), {"load": jnp.int32(2**31 - 1)}
        >>> as_integers(with_block(zeros, 0, jnp.int32(1), large))[0]["load"].tolist()
        [0, 2147483647]
    """

    def join(bits: Bits) -> jax.Array:
        high, low = (x.astype(jnp.int32) for x in bits)
        return (high << 16) + low

    return tuple({name: join(x) for name, x in each.items()} for each in stacks)
