"""How tokens reach the experts of a built-in model on a mesh, by formula."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from zjax.config import schema
from zjax.config.batch import BatchSizes
from zjax.config.mixture import experts_by_layer
from zjax.models.mixture import router_of
from zjax.moe.exchange import Choice, choose_exchange
from zjax.observe.flops import num_params
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.mesh import EXPERT, SEQUENCE, TENSOR
from zjax.sharding.placement import dtype_bytes


def tokens_of_device(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> int:
    """Tokens of a microbatch that a device routes."""
    length = config.data.length
    for axis in (SEQUENCE, TENSOR):
        length = length if length % sizes[axis] else length // sizes[axis]
    return batch.microbatch_size * length


def layer_exchanges(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> dict[int, Choice]:
    """The exchange of the layers with each number of experts.

    Args:
        config: Settings; read for `model` and `data.length`.
        sizes: Size of every mesh axis.
        batch: Sizes of batch and microbatch.

    Example:
        >>> from zjax.config.axes import axis_sizes
        >>> config = schema.Config(model=schema.Model(moe=schema.MoE(num_experts=8)))
        >>> found = layer_exchanges(config, axis_sizes(config, 1), BatchSizes(1, 1, 1))
        >>> found[8].exchange
        'none'
    """
    num_tokens = tokens_of_device(config, sizes, batch)

    def choose(num_experts: int) -> Choice:
        router = router_of(config.model.moe, num_experts)
        capacity = router.capacity(num_tokens, is_training=True)
        return choose_exchange(
            num_tokens=num_tokens,
            top_k=router.num_choices,
            num_experts=num_experts,
            num_shares=sizes[EXPERT],
            capacity=capacity if router.has_capacity else None,
        )

    return {n: choose(n) for n in sorted({*experts_by_layer(config.model)} - {0})}


def describe_active(model: schema.Model) -> str:
    """Counts the parameters that a token uses; empty without experts.

    Example:
        >>> print(describe_active(schema.Model(moe=schema.MoE(num_experts=8))))
        a token uses 124,513,536 of 521,197,824 parameters
    """
    if not model.moe.num_experts:
        return ""
    active, total = num_params(model, active=True), num_params(model)
    return f"a token uses {active:,} of {total:,} parameters"


def describe_exchanges(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> str:
    """Names the exchange of each kind of layer, what it sends, and why.

    Args:
        config: Settings; read for `model`, `data.length` and the dtype.
        sizes: Size of every mesh axis.
        batch: Sizes of batch and microbatch.

    Returns:
        A table; empty if no axis splits experts.
    """
    if sizes[EXPERT] == 1 or not config.model.moe.num_experts:
        return ""
    width = config.model.embed_size * dtype_bytes(config.precision.compute_dtype)
    rows = []
    for number, choice in layer_exchanges(config, sizes, batch).items():
        sent = (sizes[EXPERT] - 1) * choice.sent * width
        cells = str(number), choice.exchange, format_bytes(sent), choice.reason
        rows.append(cells)
    title = f"experts over {EXPERT}={sizes[EXPERT]}: each of the 4 exchanges of a layer"
    columns = ("experts", "exchange", "bytes/device", "because")
    return f"{title} and microbatch\n{render_table(columns, rows, right=(0, 2))}"


class Rows(NamedTuple):
    """Rows of a device per token that it routes.

    Args:
        arrived: Rows that arrive from other devices.
        saved: Rows of the local experts whose pre-activations are saved, over all
            devices of the tensor axis.
        computed: Most rows of the local experts, over these devices.
    """

    arrived: float
    saved: float
    computed: float


def rows_per_token(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> dict[int, Rows]:
    """Rows of the layers with each number of experts; see `layer_exchanges`."""
    num_tokens = tokens_of_device(config, sizes, batch)
    shares = math.prod(sizes[axis] for axis in (EXPERT, TENSOR))

    def count(choice: Choice) -> Rows:
        arrived = choice.sent if choice.exchange != "none" else num_tokens
        arrived = shares * arrived if shares > 1 else 0
        return Rows(*(n / num_tokens for n in (arrived, choice.usual, choice.most)))

    exchanges = layer_exchanges(config, sizes, batch)
    return {number: count(choice) for number, choice in exchanges.items()}
