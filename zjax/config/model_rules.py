"""Checks rules of the built-in models and data sources."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator

from zjax.config.invariance import invariance_problems
from zjax.config.quantize_rules import rounded_model_problems
from zjax.errors import Problem
from zjax.files import META_NAME, parse_json, read_text
from zjax.schedule import buckets, dropping, lengths
from zjax.settings import attention, axes, choices, derived, mixture, schema, sequence
from zjax.settings import layers as stages
from zjax.settings.layers import cannot_unroll

"""Name of the metadata file that `zjax data prepare` writes."""


def with_vocabulary(config: schema.Config) -> schema.Config:
    """Sets an open `model.vocab_size` to the vocabulary of the prepared data.

    Unchanged if the data is not on this machine, because a run may be planned
    elsewhere.
    """
    is_open = derived.is_derived(config.model.vocab_size)
    if not is_open or config.data.source != "tokens" or not config.data.path:
        return config
    try:
        meta = parse_json(read_text(pathlib.Path(config.data.path) / META_NAME))
        # Format 1 of the file has the size below "tokenizer".
        sizes = meta["tokenizer"] if "vocab_size" not in meta else meta
        size = derived.Size(sizes["vocab_size"])
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # opening the data reports the error
        return config
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=size)
    )


Rule = Callable[[schema.Config, int], Iterator[Problem]]
Entry = tuple[tuple[str, ...], Rule]
"""Prefixes of settings that must be in range for a rule, and the rule."""

_MATRIX_OPTIMIZERS = ("lamb", "adafactor", "muon")
"""Optimizers whose update of an entry depends on the full matrix."""


def _heads(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields numbers and sizes of heads that do not divide, or cannot rotate."""
    model = config.model
    width, heads, kv_heads = model.embed_size, model.num_heads, model.num_kv_heads
    rotates_all = isinstance(model.positions, schema.Rotary) and not model.rotary.size
    is_rotary_and_odd = rotates_all and model.head_size % 2
    if not derived.is_derived(model.head_size):
        if is_rotary_and_odd:
            problem = "is odd, which rotary positions cannot use"
            yield Problem("model.head_size", model.head_size, problem, "make it even")
    elif width % heads and not model.latent:
        problem = f"does not divide model.embed_size={width}"
        remedy = f"{axes.suggest_divisors(width)}, or set model.head_size"
        yield Problem("model.num_heads", heads, problem, remedy)
    elif is_rotary_and_odd:
        problem = f"gives heads of odd size {model.head_size}, which rotary positions "
        problem += "cannot use"
        remedy = f"use a divisor of {width} that leaves an even size"
        yield Problem("model.num_heads", heads, problem, remedy)
    if heads % kv_heads:
        problem = f"does not divide model.num_heads={heads}"
        yield Problem(
            "model.num_kv_heads", kv_heads, problem, axes.suggest_divisors(heads)
        )


def _tensor(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields a tensor axis that cannot shard the heads."""
    size = axes.axis_sizes(config, num_devices)["tensor"]
    # The rule of the mesh reports wrong sizes.
    if not axes.mesh_fills(config, num_devices):
        return
    problem = _split_problem(config, size)
    if problem:
        fit = [n for n in range(1, size) if num_devices % n == 0]
        sizes = [n for n in fit if not _split_problem(config, n)]
        given = config.mesh.tensor
        problem = f"comes out as {size} and {problem}" if given == -1 else problem
        yield Problem("mesh.tensor", given, problem, axes.suggest_choices(sizes))


def _split_problem(config: schema.Config, size: int) -> str:
    """Reason why a tensor axis cannot shard the heads.

    Dense attention pads heads or copies shared key heads; sparse attention cannot, and
    a norm over all heads would count padding and copies.
    """
    heads, model = uneven_heads(config.model, size), config.model
    if heads and isinstance(model.attention, schema.Sparse):
        return f"does not divide {heads}, as model.attention='sparse' needs"
    over_heads = model.query_key_norm and model.query_key_norm_scope == "heads"
    if over_heads and (model.num_heads % size or model.num_kv_heads % size):
        heads = heads or f"model.num_kv_heads={model.num_kv_heads}"
        return f"does not divide {heads}, as query_key_norm_scope='heads' needs"
    return ""


def uneven_heads(model: schema.Model, size: int) -> str:
    """Heads setting that a tensor axis of `size` does not divide; empty if it does.

    Devices may share key heads if the number of key heads divides `size`.

    Example:
        >>> uneven_heads(schema.Model(num_heads=24, num_kv_heads=3), 2)
        'model.num_kv_heads=3 of 24 heads'
    """
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads % size:
        return f"model.num_heads={heads}"
    if kv_heads % size and size % kv_heads:
        return f"model.num_kv_heads={kv_heads} of {heads} heads"
    return ""


def _tiles(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields tiles of a feed-forward that norms, widths or optimizers rule out."""
    model, field, name = config.model, "model.mlp_tiles", config.optimizer.rule.kind
    if model.mlp_tiles == 1:
        return
    if model.mlp_size % model.mlp_tiles:
        problem = f"does not divide model.mlp_size={model.mlp_size}"
        remedy = axes.suggest_divisors(model.mlp_size)
        yield Problem(field, model.mlp_tiles, problem, remedy)
    if model.kind == "encoder":
        problem = "adds to the residual stream tile by tile, and model.kind='encoder' "
        problem += "normalises the sum"
        yield Problem(field, model.mlp_tiles, problem, "use 1, or a decoder")
    elif model.norm_position != "input":
        problem = "adds to the residual stream tile by tile, and "
        problem += f"model.norm_position={model.norm_position!r} normalises the sum"
        yield Problem(field, model.mlp_tiles, problem, "use 1, or 'input' there")
    if name in _MATRIX_OPTIMIZERS:
        problem = f"makes each tile a separate matrix to optimizer.rule={name!r}"
        remedy = "use 1, or adamw, adam, lion or sgd"
        yield Problem(field, model.mlp_tiles, problem, remedy)


def _chunks(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings that a chunked feed-forward does not support."""
    tokens, model = config.model.mlp_chunk_tokens, config.model
    settings = {
        "model.mlp_tiles": (model.mlp_tiles, 1),
        "model.moe": (choices.value_at(model, "moe"), None),
        "precision.matmul_dtype": (config.precision.matmul_dtype, "compute"),
    }
    for field, (value, allowed) in settings.items():
        if tokens and value != allowed:
            problem = f"is not built for {field}={value!r}"
            remedy = f"use 0, or {allowed!r} there"
            yield Problem("model.mlp_chunk_tokens", tokens, problem, remedy)


def _layers(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields blocks per loop iteration that do not divide segments or cannot repeat."""
    block, layers = config.model.layers_per_scan, config.model.num_layers
    by_stage = axes.axis_sizes(config, num_devices)["pipeline"] > 1
    if by_stage or config.zero.optimizer_memory != "device":
        return  # other rules refuse layers_per_scan
    shapes = mixture.segment_shapes(config.model)
    common = math.gcd(*(shape.num_blocks for shape in shapes))
    if block and common % block:
        problem = f"does not divide model.num_layers={layers}"
        if config.model.moe:
            numbers = ", ".join(str(shape.num_blocks) for shape in shapes)
            problem = f"does not divide segments of {numbers} blocks"
        yield Problem(
            "model.layers_per_scan", block, problem, axes.suggest_divisors(common)
        )
    if len(shapes) > 1 or attention.period_of_layers(config.model) > 1:
        yield from _unrolled(config)
    if block > 1 and cannot_unroll(config):
        problem = "repeats a cuDNN kernel that cannot run with deterministic=True"
        remedy = "use 0 or 1, or model.attention=xla"
        yield Problem("model.layers_per_scan", block, problem, remedy)


def _unrolled(config: schema.Config) -> Iterator[Problem]:
    """Yields determinism for models whose layers cannot be one loop."""
    if cannot_unroll(config):
        problem = "repeats a cuDNN kernel in layers of different kinds"
        remedy = "use False, or model.attention='xla'"
        yield Problem("deterministic", True, problem, remedy)


def _offload(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields model settings that contradict streaming block by block."""
    memory, model = config.zero.optimizer_memory, config.model
    if memory == "device":
        return
    if model.layers_per_scan:
        problem = f"has no effect with zero.offload={memory!r}, which runs "
        problem += "blocks one by one"
        yield Problem("model.layers_per_scan", model.layers_per_scan, problem, "use 0")
    if model.remat != "full" and model.activation_memory != "device":
        stored = f"model.activation_memory={model.activation_memory!r}"
        problem = f"saves more than block inputs, and {stored} stores those alone"
        remedy = "use full, or device there"
        yield Problem("model.remat", model.remat, problem, remedy)


def _attention(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields features that the attention kernel lacks."""
    dtype, kernel = config.precision.compute_dtype, config.model.attention.kind
    if kernel == "cudnn" and dtype == "float32":
        problem = "cannot run with precision.compute_dtype='float32'"
        remedy = "use xla, or compute in bfloat16 or float16"
        yield Problem("model.attention", "cudnn", problem, remedy)
    if config.model.attention_sinks and kernel in ("cudnn", "sparse"):
        problem = f"adds scores without keys, which model.attention={kernel!r} cannot"
        remedy = "use False, or model.attention='xla'"
        yield Problem("model.attention_sinks", True, problem, remedy)
    rate = config.model.attention_dropout_rate
    if rate and kernel in ("cudnn", "sparse"):
        problem = f"drops attention weights, which model.attention={kernel!r} cannot"
        remedy = "use 0, or model.attention='xla'"
        yield Problem("model.attention_dropout_rate", rate, problem, remedy)


def _length(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields lengths that contradict each of data, model and positions."""
    length, longest = config.data.length, config.model.max_length
    if length > longest:
        problem = f"exceeds model.max_length={longest}"
        yield Problem("data.length", length, problem, f"use at most {longest}")
    positions = config.model.positions
    if isinstance(positions, schema.Rotary) and positions.max_positions < longest:
        problem = f"is below model.max_length={longest}"
        remedy = "raise it, or leave it at 0"
        yield Problem(
            "model.positions.max_positions", positions.max_positions, problem, remedy
        )


def _vocabulary(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields a vocabulary that is too small for the bytes of the standard library."""
    size = config.model.vocab_size
    if config.data.source == "standard_library" and size < 257:
        problem = "is below the 257 tokens of data.source='standard_library'"
        yield Problem("model.vocab_size", size, problem, "use 257 or more")


def _data(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields a missing path of prepared data."""
    if config.data.source == "tokens" and not config.data.path:
        problem = "is missing for data.source='tokens'"
        remedy = "give the directory that `zjax data prepare` made"
        yield Problem("data.path", "", problem, remedy)


def _masking(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields mask settings that contradict the vocabulary or buckets."""
    if config.model.kind != "encoder":
        return
    mask_id, size = config.data.masking.mask_id, config.model.vocab_size
    if mask_id >= size:
        problem = f"is not below model.vocab_size={size}"
        remedy = f"use at most {size - 1}"
        yield Problem("data.masking.mask_id", mask_id, problem, remedy)
    if config.buckets:
        problem = "is not built for the masked tokens of model.kind='encoder'"
        yield Problem("buckets", config.buckets.kind, problem, "leave it out")


MODEL_RULES: tuple[Entry, ...] = (
    (("model",), _heads),
    (("model",), attention.rotation_problems),
    (("model",), attention.latent_problems),
    (("model", "sequence_warmup", "random_ltd", "distill"), attention.window_problems),
    (("model", "mesh"), _tensor),
    (("model",), _tiles),
    (("model", "precision"), _chunks),
    (("model", "mesh"), mixture.mixture_problems),
    (("model", "lora", "optimizer"), mixture.frozen_bias_problems),
    (("model",), _layers),
    (("model", "mesh", "pipeline"), stages.model_problems),
    ((), _offload),
    ((), _attention),
    ((), invariance_problems),
    (("quantize",), rounded_model_problems),
    (("data", "model"), attention.sparsity_problems),
    (("data", "model", "mesh"), sequence.sequence_problems),
    (("data", "model"), _length),
    (
        ("data", "model", "mesh", "num_steps", "sequence_warmup"),
        lengths.length_problems,
    ),
    (
        ("data", "num_tokens", "num_steps", "global_batch_size", "sequence_warmup"),
        lengths.end_problems,
    ),
    (("num_steps", "curriculum"), dropping.curriculum_problems),
    (
        ("data", "model", "mesh", "num_steps", "buckets"),
        buckets.bucket_problems,
    ),
    (
        (
            *("data", "model", "mesh", "pipeline", "num_steps"),
            *("random_ltd", "layer_drop"),
        ),
        dropping.model_dropping_problems,
    ),
    (
        (
            *("data", "num_steps", "global_batch_size", "sequence_warmup"),
            *("curriculum", "buckets", "random_ltd"),
        ),
        lengths.token_end_problems,
    ),
)
"""Rules of the built-in models, each with the settings that must be in range."""
DATA_RULES: tuple[Entry, ...] = (
    ((), _data),
    (("model",), _vocabulary),
    (("data", "model"), _masking),
)
