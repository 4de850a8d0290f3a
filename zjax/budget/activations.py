"""What a step of a built-in model keeps on a device beside its state, by formula.

It counts what the backward pass keeps, what computing one block again takes, and the
logits of one chunk; attention is taken to keep no scores, as kernels do.
"""

from collections.abc import Mapping

from zjax.config import schema
from zjax.config.batch import BatchSizes
from zjax.parallel.schedule import make_schedule
from zjax.sharding.mesh import PIPELINE, SEQUENCE, TENSOR
from zjax.sharding.placement import dtype_bytes


def activation_bytes(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes
) -> float:
    """Bytes on the fullest device while it differentiates, without state and gradients.

    Args:
        config: Read for `model`, `pipeline`, `data.length`, the dtype, and whether
            blocks are programs of their own.
        sizes: Of every mesh axis.
        batch: How the batch is cut.

    Returns:
        Bytes.

    Example:
        >>> from zjax.config.axes import axis_sizes
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
    kept = 0 if model.activation_memory != "device" else kept_values(model, model.remat)
    block = kept_values(model, "none")
    values = _waiting_values(config, sizes[PIPELINE], batch, kept) + 2 * block
    chunk = min(tokens, model.loss_chunk_tokens or tokens)
    vocabulary = model.vocab_size / shares / sizes[PIPELINE]
    logits = chunk * (4 + itemsize) + 4 * model.embed_size
    return per_value * values + vocabulary * logits


def kept_values(model: schema.Model, policy: str) -> int:
    """Values per token that the backward pass of a block keeps, its input among them.

    Args:
        model: Shape of the model.
        policy: As `model.remat`.

    Returns:
        Their number; of `none`, as if nothing were computed again.

    Example:
        >>> model = schema.Model(embed_size=1, mlp_size=4, num_heads=1, num_kv_heads=1)
        >>> [kept_values(model, name) for name in ("elementwise", "attention", "full")]
        [10, 2, 1]
    """
    stream = model.embed_size
    head_size = stream // model.num_heads
    projections = stream + 2 * model.num_kv_heads * head_size
    entering = model.mlp_size * (2 if model.activation == "swiglu" else 1)
    elementwise = 2 * stream + projections + stream + entering
    return {
        "none": elementwise + 2 * stream + model.mlp_size,
        "elementwise": elementwise,
        "attention_and_mlp": 2 * stream + entering,
        "dots": 3 * stream + projections + entering,
        "attention": 2 * stream,
        "full": stream,
    }[policy]


def _waiting_values(
    config: schema.Config, num_stages: int, batch: BatchSizes, kept: int
) -> int:
    """Values per token of a microbatch that wait for backward passes."""
    if num_stages == 1:
        return config.model.num_layers * kept
    given = config.pipeline
    schedule = make_schedule(
        given.schedule,
        num_stages=num_stages,
        num_microbatches=batch.num_microbatches,
        num_chunks=given.num_chunks if given.schedule == "interleaved" else 1,
    )
    num_chunks = num_stages * schedule.num_chunks
    of_chunk = -(-config.model.num_layers // num_chunks) * kept
    if not given.recompute:
        return schedule.num_slots * of_chunk
    return schedule.num_slots * config.model.embed_size + of_chunk
