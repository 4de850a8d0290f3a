"""Footprint: the memory that a generator takes, and the least time that it allows."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from zjax.errors import ConfigError, Problem
from zjax.generation.dtypes import COMPUTE, Dtypes, dtype_problems
from zjax.generation.passes import Reader
from zjax.generation.programs import layer_page_bytes
from zjax.generation.prompts import model_problems
from zjax.generation.sizes import PAGE_SIZE, fit_pages, row_pages
from zjax.models.continuation import params_of
from zjax.offload.stream import moved_bytes
from zjax.offload.units import UnitStream
from zjax.settings import schema
from zjax.settings.attention import sliding_layers, window_of_layers
from zjax.settings.mixture import experts_per_token
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import Plan
from zjax.typing import Model
from zjax_kernels.decode.product.tuning import num_bits

HOST_BYTES_PER_SECOND = 4e10
"""Bytes per second from the host to a device, as `zjax tune` assumes them."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes on a device that a generator takes, and that a step reads.

    A step reads one token of each row, and chooses the next.

    Args:
        config: Shape of the model.
        dense_bytes: Bytes of the weights that a step reads in full.
        table_row_bytes: Bytes of the rows of tables that a token reads.
        expert_bytes: Bytes of the weights of experts, of which a token reads a few.
        num_experts: Experts of a layer; 0 if there are none.
        resident_bytes: Bytes of weights that stay on the device, and of weights on
            the way to the device.
        start_bytes: Bytes of weights while a generator starts.
        streamed_bytes: Bytes of weights that come from another memory for each pass.
        staged_bytes: Most bytes of streamed weights on the device at once.
        layer_page_bytes: Bytes of a page of each layer.
    """

    config: schema.Model
    dense_bytes: int
    table_row_bytes: float
    expert_bytes: int
    num_experts: int
    resident_bytes: int
    start_bytes: int
    streamed_bytes: int
    staged_bytes: int
    layer_page_bytes: tuple[int, ...]

    @property
    def token_bytes(self) -> float:
        """Bytes of the keys and values of a token."""
        return sum(self.layer_page_bytes) / PAGE_SIZE

    def row_pages(self, length: int) -> int:
        """Counts the pages that a row of a length holds at most."""
        return row_pages(length, window_of_layers(self.config))

    def fit_tokens(self, device_bytes: int | float) -> int:
        """Counts the tokens of the pages that fit beside the weights."""
        free = max(device_bytes - self.resident_bytes, 0)
        number = fit_pages(free, sum(self.layer_page_bytes))
        return max(number - 1, 0) * PAGE_SIZE  # one page is the sink

    def fit_rows(self, device_bytes: int | float, max_rows: int, length: int) -> int:
        """Counts the rows of a length that fit, up to `max_rows`.

        `device_bytes` are infinite if the memory is not known.
        """
        if math.isinf(device_bytes):
            return max_rows
        tokens = self.row_pages(length) * PAGE_SIZE
        return min(max_rows, self.fit_tokens(device_bytes) // tokens)

    def touched_experts(self, num_rows: int) -> float:
        """Returns the share of the experts that a step reads, on average.

        Routers are taken to choose all experts alike, each token apart.
        """
        moe = self.config.moe
        if not (moe and self.num_experts):
            return 0.0
        share = min(experts_per_token(moe) / self.num_experts, 1.0)
        return 1 - (1 - share) ** num_rows

    def weight_bytes(self, num_rows: int) -> float:
        """Returns the bytes of weights that a step reads."""
        experts = self.touched_experts(num_rows) * self.expert_bytes
        return self.dense_bytes + num_rows * self.table_row_bytes + experts

    def cache_bytes(self, num_rows: int, length: int) -> float:
        """Returns the bytes of keys and values that a step reads of rows of a length.

        Layers with a sliding window read the keys in the window.
        """
        window = self.config.window.size if self.config.window else 0
        slides = sliding_layers(self.config)
        lengths = (min(window, length) if each else length for each in slides)
        pairs = zip(self.layer_page_bytes, lengths, strict=True)
        return num_rows * sum(each * seen for each, seen in pairs) / PAGE_SIZE

    def step_seconds(self, num_rows: int, length: int, bandwidth: int | float) -> float:
        """Returns the least seconds of a step, by the memory or by the link.

        Args:
            num_rows: Rows at once, 1 or more.
            length: Tokens of each row.
            bandwidth: Bytes per second that a device reads.
        """
        read = self.weight_bytes(num_rows) + self.cache_bytes(num_rows, length)
        return max(read / bandwidth, self.streamed_bytes / HOST_BYTES_PER_SECOND)


def footprint_of(
    config: schema.Config, plan: Plan, model: Model, dtypes: Dtypes = COMPUTE
) -> Footprint:
    """Finds the footprint of a generator with the weights of a run, without weights.

    Args:
        config: Settings of the run.
        plan: Plan of the run, on devices or on an abstract mesh.
        model: Model of the run.
        dtypes: How weights and keys are stored.

    Raises:
        ConfigError: The model writes no text, or cannot be stored so.
    """
    stack = model.stack
    if stack is None or stack.continuation is None:
        problem, remedy = "writes no text", "use the built-in decoder"
        raise ConfigError(Problem("model.kind", config.model.kind, problem, remedy))
    if problems := [*model_problems(config.model)]:
        raise ConfigError(*problems)
    streams = config.zero.offloads_blocks and model.runs_by_block
    block_bytes, pages = _laid_out(plan, model, dtypes, streams=streams)
    embed, segments, head = (jax.tree.leaves(x) for x in stack.split(plan.compute))
    shared = {row.path for row in head}
    only_embed = [x for x in embed if x.path not in shared]
    tables = [x for x in only_embed if len(x.shape) > 1]
    experts = [x for x in segments if "/experts/" in x.path]
    ends = _used_bytes(only_embed) + _used_bytes(head)
    given = ends + _used_bytes(segments)
    laid = given if block_bytes is None else ends + block_bytes
    # Blocks are deleted as they are cut: one is there twice.
    block = (laid - ends) // sum(x.num_blocks for x in stack.segments)
    resident, start, streamed, staged = laid, given + block, 0, 0
    if streams:
        units = UnitStream(stack, plan)
        sizes = [moved_bytes(rows) for rows in units.rows]
        # The first units of the next pass come during the last of a pass.
        streamed, staged = sum(sizes), units.stream.most_bytes([*sizes, *sizes])
        rows = (*only_embed, *segments, *head)
        resident = sum(x.device_bytes for x in rows if x.is_on_device) + staged
        start = resident
    return Footprint(
        config=config.model,
        dense_bytes=laid - _used_bytes(tables) - _used_bytes(experts),
        table_row_bytes=sum(x.used_bytes / x.shape[0] for x in tables),
        expert_bytes=_used_bytes(experts),
        num_experts=_num_experts(experts[0]) if experts else 0,
        resident_bytes=resident,
        start_bytes=start,
        streamed_bytes=streamed,
        staged_bytes=staged,
        layer_page_bytes=tuple(pages),
    )


def _laid_out(
    plan: Plan, model: Model, dtypes: Dtypes, *, streams: bool
) -> tuple[int | None, list[int]]:
    """Lays blocks out abstractly, as an engine does.

    Returns the bytes of blocks as codes, None without codes, and the bytes on a device
    of a page of each layer.
    """
    rows = plan.compute
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    with jax.sharding.use_abstract_mesh(plan.mesh.abstract_mesh):
        decoder: Any = None if streams else model.bind(shapes, {})
        if problems := [*dtype_problems(decoder, dtypes)]:
            raise ConfigError(*problems)
        if streams:
            assert model.stack is not None
            reader = Reader(model.stack)
        else:
            reader, shapes = Reader.of(decoder, dtypes), params_of(decoder)
        weights = jax.eval_shape(reader.cut, shapes)
        pages = layer_page_bytes(reader, weights, PAGE_SIZE)
    if dtypes.weights == "compute":
        return None, pages
    # Codes are refused where a mesh would split them.
    blocks = jax.tree.leaves(weights.blocks)
    return sum(x.size * num_bits(x.dtype) // 8 for x in blocks), pages


def _used_bytes(rows: Iterable[ArrayPlan]) -> int:
    """Adds up the bytes on a device of weights as passes read them."""
    return sum(row.used_bytes for row in rows)


def _num_experts(row: ArrayPlan) -> int:
    """Number of experts of an array that stacks these, behind the dim of layers."""
    return row.shape[1 if row.num_layers else 0]
