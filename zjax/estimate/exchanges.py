"""Exchanges between devices in the layers, and the parameters that a token uses."""

from collections.abc import Mapping

from zjax.estimate.activations import sent_bytes
from zjax.models.flops import num_params
from zjax.models.mixture import router_of
from zjax.moe.exchange import Choice, choose_exchange
from zjax.settings import schema
from zjax.settings.batch import BatchSizes
from zjax.settings.mixture import experts_by_layer
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.mesh import EXPERT, SEQUENCE, TENSOR
from zjax.typing import Model


def tokens_of_device(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> int:
    """Tokens of a microbatch that a device routes to experts."""
    length = config.data.length
    for axis in (SEQUENCE, TENSOR):
        # A length that an axis does not divide is routed by every device of the axis.
        length = length if length % sizes[axis] else length // sizes[axis]
    return batch.microbatch_size * length


def layer_exchanges(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> dict[int, Choice]:
    """Chooses the exchange of experts, by number of experts of a layer.

    Example:
        >>> from zjax.settings.axes import axis_sizes
        >>> config = schema.Config(model=schema.Model(moe=schema.TokenChoice()))
        >>> found = layer_exchanges(config, axis_sizes(config, 1), BatchSizes(1, 1, 1))
        >>> found[8].exchange
        'none'
    """
    if (moe := config.model.moe) is None:
        return {}
    num_tokens = tokens_of_device(config, sizes, batch)

    def choose(num_experts: int) -> Choice:
        router = router_of(moe, num_experts)
        capacity = router.capacity(num_tokens, is_training=True)
        return choose_exchange(
            num_tokens=num_tokens,
            top_k=router.num_choices,
            num_experts=num_experts,
            num_shares=sizes[EXPERT],
            capacity=capacity if router.has_capacity else None,
        )

    # 0 stands for dense layers, which exchange nothing.
    return {n: choose(n) for n in sorted({*experts_by_layer(config.model)} - {0})}


def describe_active(model: schema.Model) -> str:
    """Counts the parameters that a token uses; empty without experts.

    Example:
        >>> print(describe_active(schema.Model(moe=schema.TokenChoice())))
        a token uses 124,513,536 of 521,197,824 parameters
    """
    if not model.moe:
        return ""
    active, total = num_params(model, active=True), num_params(model)
    return f"a token uses {active:,} of {total:,} parameters"


def describe_exchanges(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes, model: Model
) -> str:
    """Tables of the bytes that layers send, and of the exchanges of experts."""
    sent = sent_bytes(config, sizes, batch.microbatch_size, model)
    if not sent:
        return ""
    rows = [(f"{axis}={sizes[axis]}", format_bytes(sent[axis])) for axis in sent]
    title = "a device sends in the layers, for each microbatch"
    table = f"{title}\n{render_table(('axis', 'bytes/device'), rows, right=(1,))}"
    if sizes[EXPERT] == 1 or not config.model.moe:
        return table
    choices = layer_exchanges(config, sizes, batch).items()
    rows = [(str(number), x.exchange, x.reason) for number, x in choices]
    columns = ("experts", "exchange", "because")
    return f"{table}\n\n{render_table(columns, rows, right=(0,))}"
