"""Names and layouts of the tensors of Hugging Face checkpoints, one table per family.

Reference: the model classes of github.com/huggingface/transformers.
"""

import dataclasses
import functools

from zjax.weights.tensors import Row

_INPUTS = ("heads head", "kv_heads head", "kv_heads head")
"""Output dims of queries, keys and values, which a joined tensor holds in turn."""
_LAYER = "model.layers.{layer}"


def _turned(dims: str) -> str:
    """Dims of a torch `Linear` weight, with outputs first."""
    return "|".join(reversed(dims.split("|")))


def _linear(
    ours: str,
    theirs: str,
    dims: str,
    *,
    layer: str = f"{_LAYER}.",
    is_turned: bool = True,
    bias: str | None = "use_bias",
    unless: str = "",
    part: int = 0,
    parts: tuple[str, ...] = (),
) -> tuple[Row, ...]:
    """Kernel and bias of a matrix, or of a part of a joined matrix.

    `is_turned` means outputs first, as in a torch `Linear`. `bias` is the setting of
    the bias: always there if empty, never if None. `layer` is empty outside of layers.
    """
    ours, theirs = f"blocks.{ours}" if layer else ours, f"{layer}{theirs}"
    outputs, tensor = dims.rpartition("|")[2], _turned(dims) if is_turned else ""
    kernel = Row(f"{ours}.kernel", f"{theirs}.weight", dims, tensor, part, parts)
    if bias is None:
        return (dataclasses.replace(kernel, unless=unless),)
    added = Row(f"{ours}.bias", f"{theirs}.bias", outputs, "", part, parts, needs=bias)
    return kernel, added


_conv = functools.partial(
    _linear, layer="transformer.h.{layer}.", is_turned=False, bias=""
)
"""Kernel and bias of GPT-2's `Conv1D`, with inputs first."""
_plain = functools.partial(_linear, bias=None)
"""Kernel of a torch `Linear` without a bias."""
_dense = functools.partial(_linear, layer="", bias="")
"""Kernel and bias of a torch `Linear`, by full names."""


def _layer_norm(ours: str, theirs: str) -> tuple[Row, ...]:
    """Scale and bias of a layer norm."""
    return (
        Row(f"{ours}.scale", f"{theirs}.weight", "embed"),
        Row(f"{ours}.bias", f"{theirs}.bias", "embed"),
    )


def _rms_norm(
    ours: str, theirs: str, dims: str = "embed", needs: str = ""
) -> tuple[Row, ...]:
    """Scale of an RMS norm."""
    ours, theirs = f"blocks.{ours}.scale", f"{_LAYER}.{theirs}.weight"
    return (Row(ours, theirs, dims, needs=needs),)


def _query_key_norms(query_dims: str, key_dims: str) -> tuple[Row, ...]:
    """Scales of the RMS norms of queries and keys."""
    query, key = "attention.query_norm", "attention.key_norm"
    return (
        *_rms_norm(query, "self_attn.q_norm", query_dims, "query_key_norm"),
        *_rms_norm(key, "self_attn.k_norm", key_dims, "query_key_norm"),
    )


def _experts(theirs: str, gate: str, down: str, value: str) -> tuple[Row, ...]:
    """Kernels of experts, with a tensor for each expert."""
    ours, name = "blocks.mlp.experts", f"{_LAYER}.{theirs}.{{experts}}"
    return (
        Row(
            *(f"{ours}.up.kernel", f"{name}.{{gates}}.weight"),
            *("experts embed gates expert_mlp", "expert_mlp | embed"),
            gates=(gate, value),
            layers="mixture",
        ),
        Row(
            *(f"{ours}.down.kernel", f"{name}.{down}.weight"),
            *("experts expert_mlp embed", "embed | expert_mlp"),
            layers="mixture",
        ),
    )


def _joined_experts(theirs: str) -> tuple[Row, ...]:
    """Kernels and biases of all experts in one tensor; gates and values alternate."""
    ours, name = "blocks.mlp.experts", f"{_LAYER}.{theirs}"
    up, pairs = f"{name}.gate_up_proj", "expert_mlp gates"
    down, outputs = f"{name}.down_proj", "experts | embed"
    rows = (
        Row(
            *(f"{ours}.up.kernel", up, "experts embed gates expert_mlp"),
            f"experts | embed | {pairs}",
        ),
        Row(
            *(f"{ours}.up.bias", f"{up}_bias", "experts gates expert_mlp"),
            f"experts | {pairs}",
        ),
        Row(f"{ours}.down.kernel", down, "experts | expert_mlp | embed"),
        Row(f"{ours}.down.bias", f"{down}_bias", outputs),
    )
    return tuple(dataclasses.replace(row, layers="mixture") for row in rows)


def _router(theirs: str) -> tuple[Row, ...]:
    """Kernel of a router."""
    ours, theirs = "blocks.mlp.router.kernel", f"{_LAYER}.{theirs}.weight"
    return (Row(ours, theirs, "embed experts", "experts | embed", layers="mixture"),)


_EMBEDDING = (Row("embedding.tokens", "model.embed_tokens.weight", "vocab | embed"),)
_FROM_STREAM = (
    ("attention.query", "self_attn.q_proj", "embed | heads head"),
    ("attention.key", "self_attn.k_proj", "embed | kv_heads head"),
    ("attention.value", "self_attn.v_proj", "embed | kv_heads head"),
)
_OUT = _linear(
    "attention.out", "self_attn.o_proj", "heads head | embed", bias="has_output_bias"
)
_ATTENTION = (
    *(row for x in _FROM_STREAM for row in _linear(*x, bias="has_input_bias")),
    *_OUT,
)
_JOINED_ATTENTION = (
    *(
        row
        for part, (ours, _, dims) in enumerate(_FROM_STREAM)
        for row in _linear(
            *(ours, "self_attn.qkv_proj", dims),
            bias="has_input_bias",
            part=part,
            parts=_INPUTS,
        )
    ),
    *_OUT,
)
_DOWN = _linear("mlp.down", "mlp.down_proj", "mlp | embed")
_MLP = (
    *_linear("mlp.gate", "mlp.gate_proj", "embed | mlp"),
    *_linear("mlp.up", "mlp.up_proj", "embed | mlp"),
    *_DOWN,
)
_JOINED_MLP = (
    *_linear("mlp.gate", "mlp.gate_up_proj", "embed | mlp", parts=("mlp", "mlp")),
    *_linear("mlp.up", "mlp.gate_up_proj", "embed | mlp", part=1, parts=("mlp", "mlp")),
    *_DOWN,
)
_INPUT_NORMS = (
    *_rms_norm("attention_norm", "input_layernorm"),
    # An input norm of the feed-forward here; an output norm in OLMo 2 and Gemma.
    *_rms_norm("mlp_norm", "post_attention_layernorm"),
)
_HEAD = (
    Row("head.norm.scale", "model.norm.weight", "embed"),
    Row("head.kernel", "lm_head.weight", "vocab | embed", unless="tied_head"),
)
_DENSE_MLP = tuple(dataclasses.replace(row, layers="dense") for row in _MLP)
"""Feed-forward of layers without experts."""
LLAMA: tuple[Row, ...] = (
    *(*_EMBEDDING, *_INPUT_NORMS, *_ATTENTION),
    *(*_query_key_norms("head", "head"), *_MLP, *_HEAD),
)
"""Llama, Mistral, Qwen2 and Qwen3."""
MIXTRAL: tuple[Row, ...] = (
    *(*_EMBEDDING, *_INPUT_NORMS, *_ATTENTION, *_router("block_sparse_moe.gate")),
    *(*_experts("block_sparse_moe.experts", "w1", "w2", "w3"), *_HEAD),
)
GPT_OSS: tuple[Row, ...] = (
    *(*_EMBEDDING, *_INPUT_NORMS, *_ATTENTION),
    Row("blocks.attention.sinks", f"{_LAYER}.self_attn.sinks", "heads"),
    *_router("mlp.router"),
    Row("blocks.mlp.router.logit_bias", f"{_LAYER}.mlp.router.bias", "experts"),
    *(*_joined_experts("mlp.experts"), *_HEAD),
)
"""gpt-oss, with all experts of a layer in one tensor."""
QWEN3_MOE: tuple[Row, ...] = (
    *(*_EMBEDDING, *_INPUT_NORMS, *_ATTENTION, *_query_key_norms("head", "head")),
    *(*_DENSE_MLP, *_router("mlp.gate")),
    *(*_experts("mlp.experts", "gate_proj", "down_proj", "up_proj"), *_HEAD),
)
_QUERY_LATENT = tuple(
    dataclasses.replace(row, needs="latent.query_rank")
    for row in (
        *_plain("attention.query_latent", "self_attn.q_a_proj", "embed | query_latent"),
        *_rms_norm("attention.query_norm", "self_attn.q_a_layernorm", "query_latent"),
        *_plain("attention.query", "self_attn.q_b_proj", "query_latent | heads head"),
    )
)
_LATENT_ATTENTION = (
    *_plain(
        *("attention.query", "self_attn.q_proj", "embed | heads head"),
        unless="latent.query_rank",
    ),
    *_QUERY_LATENT,
    *_plain(
        *("attention.key_latent", "self_attn.kv_a_proj_with_mqa"),
        "embed | turned_key_latent",
    ),
    *_rms_norm("attention.key_norm", "self_attn.kv_a_layernorm", "key_latent"),
    *_plain(
        "attention.key_value", "self_attn.kv_b_proj", "key_latent | heads key_value"
    ),
    *_plain("attention.out", "self_attn.o_proj", "heads value | embed"),
)
_SHARED_EXPERTS = tuple(
    dataclasses.replace(row, layers="mixture", needs="moe.num_shared")
    for ours, theirs, dims in (
        ("gate", "gate_proj", "embed | shared"),
        ("up", "up_proj", "embed | shared"),
        ("down", "down_proj", "shared | embed"),
    )
    for row in _plain(f"mlp.shared.{ours}", f"mlp.shared_experts.{theirs}", dims)
)
DEEPSEEK_V3: tuple[Row, ...] = (
    *(*_EMBEDDING, *_INPUT_NORMS, *_LATENT_ATTENTION, *_DENSE_MLP),
    *_router("mlp.gate"),
    Row(
        *("blocks.mlp.router.bias", f"{_LAYER}.mlp.gate.e_score_correction_bias"),
        "experts",
        layers="mixture",
    ),
    *_experts("mlp.experts", "gate_proj", "down_proj", "up_proj"),
    *(*_SHARED_EXPERTS, *_HEAD),
)
"""DeepSeek-V3, with latents of attention and shared experts."""
PHI3: tuple[Row, ...] = (
    *(*_EMBEDDING, *_INPUT_NORMS, *_JOINED_ATTENTION, *_JOINED_MLP, *_HEAD),
)
"""Phi-3 and Phi-4, with joined inputs."""
OLMO2: tuple[Row, ...] = (
    *(*_EMBEDDING, *_ATTENTION, *_query_key_norms("heads head", "kv_heads head")),
    *_rms_norm("attention_norm", "post_attention_layernorm"),
    *_rms_norm("mlp_norm", "post_feedforward_layernorm"),
    *(*_MLP, *_HEAD),
)
"""OLMo 2, which normalises outputs."""
GEMMA: tuple[Row, ...] = (
    *(*_EMBEDDING, *_ATTENTION, *_query_key_norms("head", "head")),
    *_rms_norm("attention_norm", "input_layernorm"),
    *_rms_norm("attention_output_norm", "post_attention_layernorm"),
    *_rms_norm("mlp_norm", "pre_feedforward_layernorm"),
    *_rms_norm("mlp_output_norm", "post_feedforward_layernorm"),
    *(*_MLP, *_HEAD),
)
"""Gemma 2 and 3, which normalise inputs and outputs."""
GPT2: tuple[Row, ...] = (
    Row("embedding.tokens", "transformer.wte.weight", "vocab | embed"),
    Row("embedding.positions", "transformer.wpe.weight", "positions | embed"),
    *_layer_norm("blocks.attention_norm", "transformer.h.{layer}.ln_1"),
    *(
        row
        for part, (ours, _, dims) in enumerate(_FROM_STREAM)
        for row in _conv(ours, "attn.c_attn", dims, part=part, parts=_INPUTS)
    ),
    *_conv("attention.out", "attn.c_proj", "heads head | embed"),
    *_layer_norm("blocks.mlp_norm", "transformer.h.{layer}.ln_2"),
    *_conv("mlp.up", "mlp.c_fc", "embed | mlp"),
    *_conv("mlp.down", "mlp.c_proj", "mlp | embed"),
    *_layer_norm("head.norm", "transformer.ln_f"),
    Row("head.kernel", "lm_head.weight", "vocab | embed", unless="tied_head"),
)


def _encoder(prefix: str, transform: str, norm: str, bias: str) -> tuple[Row, ...]:
    """Rows of an encoder under a prefix, with given tensor names of the head."""
    tables, layer = f"{prefix}.embeddings", f"{prefix}.encoder.layer.{{layer}}"
    tokens, positions, types = (
        f"{tables}.{name}_embeddings.weight"
        for name in ("word", "position", "token_type")
    )
    inputs = ("query", "key", "value")
    return (
        Row("embedding.tokens", tokens, "vocab | embed"),
        Row("embedding.positions", positions, "positions | embed"),
        Row("embedding.token_types", types, "types | embed", needs="num_token_types"),
        *_layer_norm("embedding.norm", f"{tables}.LayerNorm"),
        *(
            row
            for name in inputs
            for row in _dense(
                f"blocks.attention.{name}",
                f"{layer}.attention.self.{name}",
                "embed | heads head",
            )
        ),
        *_dense(
            "blocks.attention.out",
            f"{layer}.attention.output.dense",
            "heads head | embed",
        ),
        *_layer_norm("blocks.attention_norm", f"{layer}.attention.output.LayerNorm"),
        *_dense("blocks.mlp.up", f"{layer}.intermediate.dense", "embed | mlp"),
        *_dense("blocks.mlp.down", f"{layer}.output.dense", "mlp | embed"),
        *_layer_norm("blocks.mlp_norm", f"{layer}.output.LayerNorm"),
        *_dense("head.transform", transform, "embed | hidden"),
        *_layer_norm("head.norm", norm),
        Row("head.bias", bias, "vocab"),
    )


BERT: tuple[Row, ...] = _encoder(
    "bert",
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.bias",
)
ROBERTA: tuple[Row, ...] = _encoder(
    "roberta", "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"
)
"""RoBERTa, with other tensor names in the head."""
