"""Bytes of activations of a built-in model, by formula."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from zjax.models.flops import num_params
from zjax.models.mixture import router_of
from zjax.moe.exchange import Choice, choose_exchange
from zjax.ops.attention import choose_implementation
from zjax.parallel.sequence import count_chunks
from zjax.settings import schema
from zjax.settings.batch import BatchSizes
from zjax.settings.mixture import experts_by_layer, experts_per_token
from zjax.settings.sequence import sequence_method
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.mesh import EXPERT, PIPELINE, SEQUENCE, TENSOR
from zjax.sharding.placement import dtype_bytes
from zjax.train.programs import make_pipeline_schedule


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
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> str:
    """Table of the exchange, sent bytes and reason of each kind of expert layer."""
    if sizes[EXPERT] == 1 or not config.model.moe:
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
    """Expert rows of a device, per token that the device routes.

    Args:
        arrived: Rows that arrive from other devices, summed over the tensor axis.
        saved: Rows of the local experts with saved pre-activations, summed over the
            tensor axis.
        computed: Most rows that the local experts can get, summed over the tensor axis.
    """

    arrived: float
    saved: float
    computed: float


def rows_per_token(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> dict[int, Rows]:
    """Expert rows per token, by number of experts of a layer."""
    num_tokens = tokens_of_device(config, sizes, batch)
    shares = math.prod(sizes[axis] for axis in (EXPERT, TENSOR))

    def count(choice: Choice) -> Rows:
        # Without an exchange, the tensor axis alone gathers the tokens of a device.
        arrived = choice.sent if choice.exchange != "none" else num_tokens
        arrived = shares * arrived if shares > 1 else 0
        return Rows(*(n / num_tokens for n in (arrived, choice.usual, choice.most)))

    exchanges = layer_exchanges(config, sizes, batch)
    return {number: count(choice) for number, choice in exchanges.items()}


def activation_bytes(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> float:
    """Bytes of activations on the fullest device during the backward pass.

    State and gradients are not included.

    Example:
        >>> from zjax.settings.axes import axis_sizes
        >>> config = schema.Config(model=schema.Model(remat="full", vocab_size=50_257))
        >>> sizes = axis_sizes(config, 1)
        >>> [round(activation_bytes(config, sizes, BatchSizes(n, 1, n)) / 1e6)
        ...  for n in (1, 2, 3)]
        [532, 910, 1288]
    """
    model, itemsize = config.model, dtype_bytes(config.precision.compute_dtype)
    tokens = batch.microbatch_size * config.data.length / sizes[SEQUENCE]
    shares = sizes[TENSOR]
    per_value = tokens / shares * itemsize
    rows = rows_per_token(config, sizes, batch)
    # Offloaded block inputs are in host memory.
    saved = 0 if model.offloads_inputs else saved_values(model, model.remat, rows)
    most_rows = {n: each._replace(saved=each.computed) for n, each in rows.items()}
    # The block in the backward pass is recomputed in full, at the highest expert load.
    block = saved_values(model, "none", most_rows)
    if rows:  # inputs and outputs of the experts
        most = max(each.computed for each in rows.values())
        block += math.ceil(2 * shares * most * model.embed_size)
    scores = scores_per_token(config, sizes)
    block += scores
    # All remat policies recompute attention scores.
    saved += scores if model.remat == "none" else 0
    columns = math.ceil(config.data.length / sizes[SEQUENCE] / shares)
    chunks = count_chunks(batch.microbatch_size, columns, model.mlp_chunk_tokens)
    hidden = _hidden_values(model.mlp_size, model)
    # A chunked MLP holds the hidden values of one chunk at a time.
    block -= math.floor((1 - 1 / chunks) * hidden)
    # 2 blocks: the recomputed residuals and about as many cotangents.
    values = _saved_by_all(config, sizes[PIPELINE], batch, saved) + 2 * block
    loss_tokens = min(tokens, model.loss_chunk_tokens or tokens)
    vocabulary = model.vocab_size / shares / sizes[PIPELINE]
    # Logits in float32 and their gradients; the float32 gradient of the matrix.
    logits = loss_tokens * (4 + itemsize) + 4 * model.embed_size
    return per_value * values + vocabulary * logits


def scores_per_token(config: schema.Config, sizes: Mapping[str, int]) -> int:
    """Values of attention per token that a layer holds for each pair of tokens.

    These are the scores and weights in float32, and the weights in the compute dtype;
    dropout adds random bits, a soft cap adds tanh. The unit is one value of the compute
    dtype, before heads are sharded. Kernels hold none.

    Example:
        >>> from zjax.settings.axes import axis_sizes
        >>> model = schema.Model(num_heads=2, attention_sinks=True)
        >>> config = schema.Config(model=model, data=schema.Data(length=8))
        >>> scores_per_token(config, axis_sizes(config, 1))  # 2 * 8 of 10 bytes each
        80
    """
    model, dtype = config.model, config.precision.compute_dtype
    axes = {axis: sizes[axis] for axis in (SEQUENCE, TENSOR)}
    is_ring = sizes[SEQUENCE] > 1 and sequence_method(model, **axes) == "ring"
    if is_ring or not _has_scores(config):
        return 0
    extras = 4 * (model.attention_dropout_rate > 0) + 4 * (model.attention_soft_cap > 0)
    itemsize = dtype_bytes(dtype)
    # float32 scores and weights, and weights in the compute dtype.
    num_bytes = 8 + itemsize + extras
    return math.ceil(model.num_heads * config.data.length * num_bytes / itemsize)


def _has_scores(config: schema.Config) -> bool:
    """Whether no attention kernel fits, even on a recent NVIDIA GPU."""
    model, length = config.model, config.data.length
    if model.attention.kind in ("sparse", "cudnn"):
        return False
    kernel, _ = choose_implementation(
        model.attention_kernel,
        platform="cuda",
        compute_capability=(9, 0),  # Hopper: plans are made without GPUs
        dtype=config.precision.compute_dtype,
        head_size=model.head_size,
        lengths=(length, length),
        masked=False,
        capped=model.attention_soft_cap > 0,
        dropped=model.attention_dropout_rate > 0,
        has_sinks=model.attention_sinks,
    )
    return kernel == "xla"


def saved_values(
    model: schema.Model, policy: str, rows: Mapping[int, Rows] = {}
) -> int:
    """Residuals per token that a layer saves under a policy of `model.remat`.

    The input of the block is included. By default each device has all experts.

    Example:
        >>> model = schema.Model(embed_size=1, mlp_size=4, num_heads=1, num_kv_heads=1)
        >>> [saved_values(model, name) for name in ("elementwise", "attention", "full")]
        [10, 2, 1]
    """
    residual = model.embed_size
    queries = model.num_heads * model.head_size
    projections = queries + 2 * model.num_kv_heads * model.head_size
    if latent := model.latent:
        projections += latent.key_rank + model.rotary.size + latent.query_rank
    arrived, width = _values_of_experts(model, rows)
    mlp_inputs = _hidden_values(width, model) - width
    attended = residual + queries
    elementwise = attended + residual + projections + mlp_inputs
    return {
        "none": elementwise + 2 * residual + width + arrived,
        "elementwise": elementwise + arrived,
        "attention_and_mlp": attended + mlp_inputs + arrived,
        "dots": elementwise + arrived,
        "attention": attended + arrived,
        "full": residual,
    }[policy]


def _hidden_values(width: int, model: schema.Model) -> int:
    """Values per token in a feed-forward layer with `width` hidden channels."""
    return width * (3 if model.is_gated else 2)  # gate, up, product; or up, activated


def _values_of_experts(
    model: schema.Model, rows: Mapping[int, Rows]
) -> tuple[int, int]:
    """Values per token that arrive for experts, and hidden channels, as layer means."""
    if (moe := model.moe) is None:
        return 0, model.mlp_size
    experts = experts_by_layer(model)
    arrived, hidden = 0.0, 0.0
    for number in experts:
        used = experts_per_token(moe)
        own = rows.get(number, Rows(0, used, used))
        active = own.saved + moe.num_shared + moe.residual
        arrived += own.arrived * model.embed_size if number else 0
        hidden += active * moe.expert_size if number else model.mlp_size
    # Means, as the caller multiplies by the number of layers.
    return math.ceil(arrived / len(experts)), math.ceil(hidden / len(experts))


def _saved_by_all(
    config: schema.Config, num_stages: int, batch: BatchSizes, saved: int
) -> int:
    """Saved values per token over the blocks and microbatches that a stage holds."""
    if num_stages == 1:
        return config.model.num_layers * saved
    given = config.pipeline
    schedule = make_pipeline_schedule(given, num_stages, batch.num_microbatches)
    num_chunks = num_stages * schedule.num_chunks
    chunk_values = -(-config.model.num_layers // num_chunks) * saved
    if not given.recomputes:
        return schedule.num_slots * chunk_values
    # With recompute, a slot holds only the input of a chunk, and one chunk is
    # recomputed at a time.
    return schedule.num_slots * config.model.embed_size + chunk_values
