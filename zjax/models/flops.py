"""FLOPs of a model by formula, and the peak FLOP/s of devices."""

import functools
import math
import re
from collections.abc import Mapping
from typing import Literal

import jax

from zjax.models.build import make_model
from zjax.ops import sparse
from zjax.settings import schema
from zjax.settings.attention import sliding_layers
from zjax.settings.mixture import experts_by_layer, experts_per_token
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key

_TABLE = re.compile("embedding/(tokens|positions|token_types)")
_EXPERTS_DIM = 1
"""Dim of the experts in stacked arrays, behind the dim of the layers."""


@functools.lru_cache
def multiplied_weights(model: schema.Model) -> Mapping[str, float]:
    """Returns the number of weights that multiply a token, by path.

    Example:
        >>> multiplied_weights(schema.Model())["blocks/mlp/up/kernel"] / 12
        2359296.0
    """
    built = make_model(schema.Config(model=model))
    params, _ = jax.eval_shape(built.init, abstract_key())
    weights = dict[str, float]()
    for keys, array in jax.tree_util.tree_leaves_with_path(params):
        path, size = path_of(keys), math.prod(array.shape)
        # A tied table is looked up and multiplied; only the product counts.
        is_read_once = path == "embedding/tokens" and model.tied_head
        if model.moe and "/experts/" in path:
            number = array.shape[_EXPERTS_DIM]
            size *= min(experts_per_token(model.moe), number) / number
        if is_read_once or not _TABLE.fullmatch(path):
            weights[path] = float(size)
    return weights


CausalAttention = Literal["half", "full"]


def num_params(model: schema.Model, *, active: bool = False) -> int:
    """Counts parameters of a built-in model; `active` counts the experts of one token.

    Example:
        >>> num_params(schema.Model())
        124439808
    """
    width, bias = model.embed_size, int(model.use_bias)
    norm = _norm_vectors(model) * width
    num_norms = 4 if model.norm_position == "both" else 2
    blocks = model.num_layers * (_attention_params(model) + num_norms * norm)
    for num_experts in experts_by_layer(model):
        if model.moe and num_experts:
            blocks += _mixture_params(model, model.moe, num_experts, active)
        else:
            blocks += _mlp_params(model, model.mlp_size)
    head = norm + (0 if model.tied_head else model.vocab_size * width)
    if model.kind == "encoder":
        head += norm + (width + bias) * width + bias * model.vocab_size
    return _table_params(model) + blocks + head


def matmul_params(model: schema.Model) -> int:
    """Counts the parameters that multiply a token: the N of 6 N.

    Token and position tables do not count; the output matrix counts once, tied or not.
    Of a layer's experts only as many count as a token has.

    Example:
        >>> matmul_params(schema.Model())
        123653376
    """
    tied = model.vocab_size * model.embed_size if model.tied_head else 0
    return num_params(model, active=True) - _table_params(model) + tied


def flops_per_token(
    model: schema.Model,
    length: int,
    *,
    causal_attention: CausalAttention,
    per_weight: float = 6.0,
) -> float:
    """Computes the FLOPs of forward and backward pass per token: 6 N plus attention.

    Full attention costs 12 x layers x heads x head size x length, and half as much if
    `causal_attention` is "half". An encoder always counts in full; sparse attention
    counts the blocks of the layout. Heads with values of another size count with the
    mean of both sizes.

    Example:
        >>> flops_per_token(schema.Model(), 1024, causal_attention="half") / 1e6
        798.54336

    Reference:
        Narayanan et al., arXiv:2104.04473, appendix; PaLM, arXiv:2204.02311, appendix
        B.
    """
    factor = _attention_factor(model, length, causal_attention)
    attention = factor * model.num_layers * _attended_channels(model) * length
    return float(per_weight * matmul_params(model) + attention)


def describe_flops(
    model: schema.Model,
    length: int,
    *,
    causal_attention: CausalAttention,
    per_weight: float = 6.0,
) -> str:
    """Writes the formula of `flops_per_token` with numbers, in one line.

    Example:
        >>> print(describe_flops(schema.Model(), 1024, causal_attention="full"))
        6 x 123,653,376 + 12 x 12 layers x 768 x 1,024 = 855.2 MFLOP per token
    """
    factor = _attention_factor(model, length, causal_attention)
    total = flops_per_token(
        model, length, causal_attention=causal_attention, per_weight=per_weight
    )
    channels = _attended_channels(model)
    attention = f"{model.num_layers} layers x {channels:,} x {length:,}"
    text = f"{per_weight:.4g} x {matmul_params(model):,} + {factor:.4g} x {attention}"
    return f"{text} = {total / 1e6:,.1f} MFLOP per token"


_PEAKS: dict[str, tuple[float, float, float]] = {
    "H200": (989.4, 989.4, 494.7),
    "GH200": (989.4, 989.4, 494.7),
    "H100 PCIe": (756.0, 756.0, 378.0),
    "H100 NVL": (835.0, 835.0, 417.5),
    "H100": (989.4, 989.4, 494.7),
    "H20": (148.0, 148.0, 74.0),
    "B200": (2250.0, 2250.0, 1125.0),
    "GB200": (2500.0, 2500.0, 1250.0),
    "A100": (312.0, 312.0, 156.0),
    "A800": (312.0, 312.0, 156.0),
    "A40": (149.7, 149.7, 74.8),
    "A30": (165.0, 165.0, 82.0),
    "A10": (125.0, 125.0, 62.5),
    "A10G": (70.0, 70.0, 35.0),
    "RTX A6000": (154.8, 154.8, 77.4),
    "L40S": (362.0, 362.0, 183.0),
    "L40": (181.0, 181.0, 90.5),
    "L4": (121.0, 121.0, 60.0),
    "RTX 3090": (71.0, 71.0, 35.6),
    "RTX 4090": (165.2, 165.2, 82.6),
    "RTX 5090": (209.5, 209.5, 104.8),
    "V100-PCIE": (14.0, 112.0, 14.0),
    "V100": (15.7, 125.0, 15.7),
    "T4": (8.1, 65.0, 8.1),
}
"""Dense TFLOP/s per device in bfloat16, float16 and float32 with float32 accumulation,
from data sheets. float32 means TF32 where the device has it; bfloat16 means float32
where the device lacks bfloat16 units. First match wins."""


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Returns peak FLOP/s by `jax.Device.device_kind`; None for a device like a CPU.

    Example:
        >>> peak_flops("NVIDIA H200", "bfloat16"), peak_flops("cpu", "bfloat16")
        (989400000000000.0, None)
    """
    column = ("bfloat16", "float16", "float32").index(dtype)
    # Spaces keep L4 from matching L40 and A10 from matching A100.
    words = f" {device_kind} ".replace("-", " ")
    for name, teraflops in _PEAKS.items():
        if f" {name} ".replace("-", " ") in words:
            return teraflops[column] * 1e12
    return None


def _norm_vectors(model: schema.Model) -> int:
    """Number of vectors of a norm: scale, and bias if there is one."""
    return 2 if model.norm == "layer_norm" and model.use_bias else 1


def _attended_channels(model: schema.Model) -> int:
    """Channels of all heads, the mean of queries and values."""
    return model.num_heads * (model.head_size + model.value_size) // 2


def _attention_params(model: schema.Model) -> int:
    """Counts the parameters of an attention layer."""
    width, heads, size = model.embed_size, model.num_heads, model.head_size
    out = (heads * model.value_size + model.has_output_bias) * width
    if model.latent:
        return out + _latent_params(model, model.latent)
    queries, keys = heads * size, model.num_kv_heads * size
    inputs = (width + model.has_input_bias) * (queries + 2 * keys)
    inputs += model.attention_sinks * heads
    if model.query_key_norm:
        over_heads = model.query_key_norm_scope == "heads"
        normed = queries + keys if over_heads else 2 * size
        inputs += _norm_vectors(model) * normed
    return out + inputs


def _latent_params(model: schema.Model, latent: schema.Latent) -> int:
    """Counts the parameters of latent attention without the output matrix."""
    width, heads = model.embed_size, model.num_heads
    queries, norm = heads * model.head_size, _norm_vectors(model)
    params = (latent.key_rank + model.rotary.size) * width
    params += (heads * (latent.plain_size + latent.value_size) + norm) * latent.key_rank
    if latent.query_rank:
        return params + (width + norm + queries) * latent.query_rank
    return params + width * queries


def _mlp_params(model: schema.Model, size: int) -> int:
    """Counts the parameters of a feed-forward of width `size`."""
    width, bias = model.embed_size, int(model.use_bias)
    num_inputs = 2 if model.is_gated else 1
    return num_inputs * (width + bias) * size + (size + bias) * width


def _mixture_params(
    model: schema.Model, moe: schema.MoE, num_experts: int, active: bool
) -> int:
    """Counts the parameters of a mixture of experts."""
    width = model.embed_size
    used = min(experts_per_token(moe), num_experts) if active else num_experts
    params = round(used * _mlp_params(model, moe.expert_size))
    # A router has a column of weights, and up to two biases, per expert.
    params += (width + moe.has_choice_bias + moe.router_bias) * num_experts
    if moe.num_shared:
        params += _mlp_params(model, moe.num_shared * moe.expert_size)
    params += width * moe.shared_gate
    if moe.residual:
        # The coefficient has 2 outputs.
        params += _mlp_params(model, moe.expert_size) + 2 * (width + 1)
    return params


def _table_params(model: schema.Model) -> int:
    """Counts the parameters of token, position and token type tables."""
    num_rows = model.vocab_size + model.num_positions + model.num_token_types
    return num_rows * model.embed_size


def _attention_factor(
    model: schema.Model, length: int, causal_attention: CausalAttention
) -> float:
    """FLOPs of attention per channel and pair of tokens, averaged over layers."""
    if pattern := sparse.sparse_of(model):
        return 12 * sparse.live_fraction(pattern, length)
    half = model.kind == "decoder" and causal_attention == "half"
    return (6.0 if half else 12.0) * _share_in_windows(model, length)


def _share_in_windows(model: schema.Model, length: int) -> float:
    """Share of the unmasked pairs that layers see, averaged over layers."""
    window = min(model.window_size, length)
    # The first tokens of a row see less than a window.
    pairs = window * length - window * (window - 1) / 2
    share = pairs / (length * (length + 1) / 2)
    sliding = sum(sliding_layers(model)) / model.num_layers
    return 1.0 - sliding * (1.0 - share)
