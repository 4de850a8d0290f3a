"""Meaning of the keys of a Hugging Face config.json, by family.

Every key that changes the outputs of a model is either a setting of zjax or must have
the one value that zjax computes. Any other key is known, or unknown and reported.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zjax.settings import choices, schema
from zjax.settings.choices import KIND
from zjax.weights import rows
from zjax.weights.keys import Key
from zjax.weights.tensors import Row
from zjax.weights.windows import NO_WINDOWS, Windows


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes how a kind of checkpoint becomes a decoder or an encoder.

    Args:
        architecture: Class of transformers.
        rows: Table of arrays and tensors.
        prefix: Start of tensor names, missing in checkpoints without a head.
        buffers: Pattern of tensors that outputs do not depend on.
        spellings: Endings of tensor names in old checkpoints, by usual ending.
        constant: Settings of every model of the family.
        keys: Keys that are settings.
        fixed: Keys with one meaning in zjax, and the values with that meaning; the
            first value is the default.
        biases: Keys of the biases of attention and of the feed-forward, False by
            default; empty if `constant` sets the biases.
        is_partial: Whether rotary positions may rotate only some channels of a head.
        windows: Layers with sliding windows.
        theta: Base of rotary positions, if a config.json has none.
        local_theta: Base of rotary positions in sliding layers; 0 for one base in all
            layers.
        dropouts: Keys of dropout rates, by setting; a rate without a key is 0.
        default_dropout: Dropout rate if the key is absent.
        padding: Key of the padding id, or empty. Positions start at padding id + 1, so
            the key of `max_length` includes that offset.
        unread: Keys without a meaning beside other keys.
        written: Values that exports write for keys without a meaning.
        predicts_more: Whether layers behind the last layer may predict further tokens.
        aliases: Usual keys, by name in some versions of transformers.
        has_steps: Whether keys tell which layers have experts.
        is_scaled: Whether positions are scaled where a config.json does not say so.
        scalings: Usual names of kinds of scaling, by other name.
    """

    architecture: str
    rows: tuple[Row, ...]
    prefix: str
    buffers: str
    constant: Mapping[str, Any]
    keys: Mapping[str, Key]
    fixed: Mapping[str, tuple[Any, ...]]
    biases: tuple[str, ...] = ()
    is_partial: bool = False
    windows: Windows = NO_WINDOWS
    theta: float = 10_000.0
    local_theta: float = 0.0
    dropouts: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"attention_dropout_rate": "attention_dropout"}
    )
    default_dropout: float = 0.0
    padding: str = ""
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    predicts_more: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_steps: bool = False
    is_scaled: bool = False
    scalings: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"su": "longrope"}
    )

    @property
    def is_mixture(self) -> bool:
        """Whether layers have experts."""
        return "moe" in self.constant

    @property
    def has_latents(self) -> bool:
        """Whether keys and values come from latents."""
        return self.constant["latent"] is not None

    @property
    def is_rotary(self) -> bool:
        """Whether positions are rotations, with keys for base and scaling."""
        return self.constant["positions"] == _ROTARY

    @property
    def free(self) -> frozenset[str]:
        """Settings of a run that neither weights nor other keys depend on."""
        return frozenset({"max_length"} if self.is_rotary else ())


PADDING = 1
"""Default padding id, where positions depend on the padding id."""
DROPOUTS = "dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"
"""Settings of dropout rates."""
BOOKKEEPING = frozenset(
    """
    _name_or_path architectures bos_token_id eos_token_id pad_token_id unk_token_id
    torch_dtype dtype transformers_version use_cache initializer_range model_type
    pretraining_tp task_specific_params output_attentions output_hidden_states
    return_dict torchscript summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj n_ctx id2label label2id
    problem_type is_decoder is_encoder_decoder reorder_and_upcast_attn max_window_layers
    """.split()
)
"""Keys that do not change the logits of a language model, unless a family fixes a
value."""
_LEARNED = {"kind": "learned", "first": 0}
_ROTARY = {"kind": "rotary", "pairs": "halves"}
_PLAIN = {
    "kind": "decoder",
    "norm_position": "input",
    "zero_centered_norm": False,
    "query_key_norm": False,
    "query_key_norm_scope": "head",
    "query_scale_size": 0,
    "latent": None,
    "attention_soft_cap": 0.0,
    "attention_sinks": False,
    "logit_soft_cap": 0.0,
    "scaled_embedding": False,
    "num_token_types": 0,
}
"""Settings of a family without special features."""
_LLAMA_CONSTANT = _PLAIN | {
    "norm": "rms_norm",
    "positions": _ROTARY,
    "activation": "swiglu",
}
_NO_BIAS = {"use_bias": False, "attention_bias": "use_bias"}
# Defaults, here and below, are defaults of transformers' config classes, since a
# config.json may leave out such values.
_LLAMA_KEYS = {
    "num_hidden_layers": Key("num_layers", int),
    "hidden_size": Key("embed_size", int),
    "intermediate_size": Key("mlp_size", int),
    "num_attention_heads": Key("num_heads", int),
    "num_key_value_heads": Key("num_kv_heads", int, None),  # one per head
    "head_dim": Key("head_size", int, None),  # embed_size / num_heads
    "vocab_size": Key("vocab_size", int),
    "max_position_embeddings": Key("positions.max_positions", int),
    "rms_norm_eps": Key("norm_eps", float, 1e-6),
    "tie_word_embeddings": Key("tied_head", bool, False),
}
_LLAMA_FIXED = {"hidden_act": ("silu", "swish")}
_BIAS_FALSE = {"attention_bias": (False,), "mlp_bias": (False,)}
_LLAMA = Family(
    architecture="LlamaForCausalLM",
    rows=rows.LLAMA,
    prefix="model.",
    buffers=r".*\.rotary_emb\.inv_freq",
    constant=_LLAMA_CONSTANT,
    keys=_LLAMA_KEYS,
    fixed=_LLAMA_FIXED,
    biases=("attention_bias", "mlp_bias"),
)


def _dropouts(outputs: str, embedding: str, attention: str) -> dict[str, str]:
    return dict(zip(DROPOUTS, (outputs, embedding, attention), strict=True))


def _soft_caps(attention: float | None, logits: float | None) -> dict[str, Key]:
    """Keys of soft caps; arguments are the defaults, where None means no cap."""
    names = ("attention_soft_cap", attention), ("logit_soft_cap", logits)
    keys = [Key(name, float, default, is_nullable=True) for name, default in names]
    return dict(
        zip(("attn_logit_softcapping", "final_logit_softcapping"), keys, strict=True)
    )


_GEMMA = Family(
    architecture="Gemma2ForCausalLM",
    rows=rows.GEMMA,
    prefix="model.",
    buffers=r".*\.rotary_emb\.inv_freq",
    constant=_LLAMA_CONSTANT
    | {
        "norm_position": "both",
        "zero_centered_norm": True,
        "activation": "geglu",
        "scaled_embedding": True,
    },
    keys=_LLAMA_KEYS
    | {
        "num_key_value_heads": Key("num_kv_heads", int, 4),
        "head_dim": Key("head_size", int, 256),
        "tie_word_embeddings": Key("tied_head", bool, True),
        "query_pre_attn_scalar": Key("query_scale_size", int, 256),
    }
    | _soft_caps(attention=50.0, logits=30.0),
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    },
    biases=("attention_bias",),
    windows=Windows("period", default=4096, period=2),
    # transformers reads `hidden_activation` of Gemma, not `hidden_act`.
    unread=frozenset({"hidden_act", "cache_implementation", "_sliding_window_pattern"}),
)
_SET_BY_KEYS = ("num_experts", "top_k", "expert_size")
_SET_BY_RUNS = (
    *("jitter", "sampling", "z_loss", "balance_loss", "balance_scope"),
    *("capacity_factor", "eval_capacity_factor", "min_capacity"),
)
"""Settings that change no output of a mixture without `drop` in evaluation."""
_MIXTURE = {KIND: schema.TokenChoice.kind} | {
    name: choices.default_of(schema.TokenChoice, name)
    for name in choices.names(schema.TokenChoice)
    if name not in _SET_BY_KEYS + _SET_BY_RUNS
}
"""Settings of plain experts, which drop no token: defaults unless keys or runs set
them."""
_DEEPSEEK_MOE = {
    **{name: x for name, x in _MIXTURE.items() if name != "bias_rate"},
    "scores": "sigmoid",
    "choice_bias": True,
}
"""Settings of experts in DeepSeek-V3; a run says whether the bias moves."""
_LOSS = frozenset({"router_aux_loss_coef", "output_router_logits"})
"""Keys of the balance loss, which a run sets."""
_GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
_BERT = Family(
    architecture="BertForMaskedLM",
    rows=rows.BERT,
    prefix="bert.",
    # Also without influence on masked-token logits: pooler, next-sentence head, and
    # copies of the tied table.
    buffers=r".*\.position_ids|(.*\.)?pooler\..*|cls\.seq_relationship\..*"
    r"|cls\.predictions\.decoder\..*|lm_head\.decoder\..*",
    spellings={
        "LayerNorm.weight": "LayerNorm.gamma",
        "LayerNorm.bias": "LayerNorm.beta",
    },
    # The key `type_vocab_size` sets the number of token types.
    constant={name: x for name, x in _PLAIN.items() if name != "num_token_types"}
    | {
        "kind": "encoder",
        "norm": "layer_norm",
        "positions": _LEARNED,
        "num_kv_heads": 0,
        "head_size": 0,
        "use_bias": True,
        "attention_bias": "use_bias",
        "tied_head": True,
    },
    keys={
        "num_hidden_layers": Key("num_layers", int),
        "hidden_size": Key("embed_size", int),
        "intermediate_size": Key("mlp_size", int),
        "num_attention_heads": Key("num_heads", int),
        "vocab_size": Key("vocab_size", int),
        "max_position_embeddings": Key("max_length", int),
        "type_vocab_size": Key("num_token_types", int, 2),
        "layer_norm_eps": Key("norm_eps", float, 1e-12),
        "hidden_act": Key("activation", str, "gelu", names=_GELUS),
    },
    fixed={
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    dropouts=_dropouts(
        "hidden_dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"
    ),
    default_dropout=0.1,
    unread=frozenset(
        """
        classifier_dropout gradient_checkpointing chunk_size_feed_forward directionality
        pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
        pooler_size_per_head pooler_type
        """.split()
    ),
)
FAMILIES = {
    "llama": _LLAMA,
    "mistral": dataclasses.replace(
        _LLAMA,
        architecture="MistralForCausalLM",
        constant=_LLAMA_CONSTANT | _NO_BIAS,
        keys=_LLAMA_KEYS | {"num_key_value_heads": Key("num_kv_heads", int, 8)},
        fixed=_LLAMA_FIXED | _BIAS_FALSE,
        biases=(),
        windows=Windows("all", default=4096),
    ),
    "qwen2": dataclasses.replace(
        _LLAMA,
        architecture="Qwen2ForCausalLM",
        constant=_LLAMA_CONSTANT | {"use_bias": False, "attention_bias": "inputs"},
        keys=_LLAMA_KEYS | {"num_key_value_heads": Key("num_kv_heads", int, 32)},
        biases=(),
        windows=Windows("switch", default=4096),
    ),
    "qwen3": dataclasses.replace(
        _LLAMA,
        architecture="Qwen3ForCausalLM",
        constant=_LLAMA_CONSTANT | {"query_key_norm": True},
        keys=_LLAMA_KEYS
        | {
            "num_key_value_heads": Key("num_kv_heads", int, 32),
            "head_dim": Key("head_size", int, 128),
        },
        biases=("attention_bias",),
        windows=Windows("switch", default=4096),
    ),
    "phi3": dataclasses.replace(
        _LLAMA,
        architecture="Phi3ForCausalLM",
        rows=rows.PHI3,
        constant=_LLAMA_CONSTANT | _NO_BIAS,
        keys=_LLAMA_KEYS | {"rms_norm_eps": Key("norm_eps", float, 1e-5)},
        fixed=_LLAMA_FIXED | _BIAS_FALSE,
        biases=(),
        windows=Windows("all"),
        is_partial=True,
        # Early Phi-3 checkpoints call longrope "su" or "yarn".
        scalings={"su": "longrope", "yarn": "longrope"},
        dropouts=_dropouts("resid_pdrop", "embd_pdrop", "attention_dropout"),
    ),
    "olmo2": dataclasses.replace(
        _LLAMA,
        architecture="Olmo2ForCausalLM",
        rows=rows.OLMO2,
        constant=_LLAMA_CONSTANT
        | {
            "norm_position": "output",
            "query_key_norm": True,
            "query_key_norm_scope": "heads",
        },
        keys=_LLAMA_KEYS | {"rms_norm_eps": Key("norm_eps", float, 1e-5)},
        biases=("attention_bias",),
    ),
    "gemma2": _GEMMA,
    "gemma3_text": dataclasses.replace(
        _GEMMA,
        architecture="Gemma3ForCausalLM",
        constant={**_GEMMA.constant, "query_key_norm": True},
        keys={**_GEMMA.keys, **_soft_caps(attention=None, logits=None)},
        windows=Windows("period", default=4096, period=6),
        theta=1_000_000.0,
        local_theta=10_000.0,
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        rows=rows.GPT2,
        prefix="transformer.",
        buffers=r".*\.attn\.(masked_)?bias",
        constant={
            **_PLAIN,
            "norm": "layer_norm",
            "positions": _LEARNED,
            "num_kv_heads": 0,
            "head_size": 0,
            "use_bias": True,
            "attention_bias": "use_bias",
        },
        keys={
            "n_layer": Key("num_layers", int),
            "n_embd": Key("embed_size", int),
            "n_inner": Key("mlp_size", int, None),
            "n_head": Key("num_heads", int),
            "vocab_size": Key("vocab_size", int),
            "n_positions": Key("max_length", int),
            "layer_norm_epsilon": Key("norm_eps", float, 1e-5),
            "activation_function": Key("activation", str, "gelu_new", names=_GELUS),
            "tie_word_embeddings": Key("tied_head", bool, True),
        },
        fixed={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        dropouts=_dropouts("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        default_dropout=0.1,
    ),
    "mixtral": dataclasses.replace(
        _LLAMA,
        architecture="MixtralForCausalLM",
        rows=rows.MIXTRAL,
        constant={**_LLAMA_CONSTANT, **_NO_BIAS, "moe": _MIXTURE},
        keys=_LLAMA_KEYS
        | {
            "num_key_value_heads": Key("num_kv_heads", int, 8),
            "rms_norm_eps": Key("norm_eps", float, 1e-5),
            "intermediate_size": Key("moe.expert_size", int),
            "num_local_experts": Key("moe.num_experts", int, 8),
            "num_experts_per_tok": Key("moe.top_k", int, 2),
        },
        fixed=_LLAMA_FIXED | {"router_jitter_noise": (0.0,)},
        biases=(),
        windows=Windows("all"),
        theta=1_000_000.0,
        unread=_LOSS,
    ),
    "qwen3_moe": dataclasses.replace(
        _LLAMA,
        architecture="Qwen3MoeForCausalLM",
        rows=rows.QWEN3_MOE,
        constant={**_LLAMA_CONSTANT, "query_key_norm": True, "moe": _MIXTURE},
        keys=_LLAMA_KEYS
        | {
            "num_key_value_heads": Key("num_kv_heads", int, 4),
            "moe_intermediate_size": Key("moe.expert_size", int, 768),
            "num_experts": Key("moe.num_experts", int, 128),
            "num_experts_per_tok": Key("moe.top_k", int, 8),
            "norm_topk_prob": Key("moe.normalise", bool, False),
        },
        fixed=_LLAMA_FIXED | {"use_sliding_window": (False,)},
        biases=("attention_bias",),
        unread=_LOSS | {"sliding_window"},
        aliases={"num_local_experts": "num_experts"},
        has_steps=True,
    ),
    "deepseek_v3": dataclasses.replace(
        _LLAMA,
        architecture="DeepseekV3ForCausalLM",
        rows=rows.DEEPSEEK_V3,
        constant={
            **(_LLAMA_CONSTANT | _NO_BIAS),
            "head_size": 0,
            "latent": {},
            "moe": _DEEPSEEK_MOE,
        },
        # `head_dim` repeats the rotary size here.
        keys={name: x for name, x in _LLAMA_KEYS.items() if name != "head_dim"}
        | {
            "q_lora_rank": Key("latent.query_rank", int, 1536, is_nullable=True),
            "kv_lora_rank": Key("latent.key_rank", int, 512),
            "qk_nope_head_dim": Key("latent.plain_size", int, 128),
            "qk_rope_head_dim": Key("positions.size", int, 64),
            "v_head_dim": Key("latent.value_size", int, 128),
            "rope_interleave": Key(
                *("positions.pairs", bool, True),
                names={False: "halves", True: "adjacent"},
            ),
            "moe_intermediate_size": Key("moe.expert_size", int, 2048),
            "n_routed_experts": Key("moe.num_experts", int, 256),
            "n_shared_experts": Key("moe.num_shared", int, 1),
            "num_experts_per_tok": Key("moe.top_k", int, 8),
            "n_group": Key("moe.num_groups", int, 8),
            "topk_group": Key("moe.top_groups", int, 4),
            "first_k_dense_replace": Key("moe.first_dense", int, 3),
            "norm_topk_prob": Key("moe.normalise", bool, True),
            "routed_scaling_factor": Key("moe.scale", float, 2.5),
        },
        fixed=_LLAMA_FIXED
        | {
            "attention_bias": (False,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        biases=(),
        unread=_LOSS
        | frozenset(
            """
            head_dim qk_head_dim num_mtp_layers ep_size aux_loss_alpha seq_aux auto_map
            """.split()
        ),
        # Exports have no layers that predict further tokens.
        written={"num_nextn_predict_layers": 0},
        predicts_more=True,
    ),
    "gpt_oss": dataclasses.replace(
        _LLAMA,
        architecture="GptOssForCausalLM",
        rows=rows.GPT_OSS,
        # The config class scales by yarn unless a config.json says otherwise.
        is_scaled=True,
        constant={
            **_LLAMA_CONSTANT,
            "activation": "clamped_swiglu",
            "use_bias": True,
            "attention_bias": "use_bias",
            "attention_sinks": True,
            "moe": _MIXTURE | {"router_bias": True},
        },
        keys=_LLAMA_KEYS
        | {
            "num_key_value_heads": Key("num_kv_heads", int, 8),
            "head_dim": Key("head_size", int, 64),
            "rms_norm_eps": Key("norm_eps", float, 1e-5),
            "intermediate_size": Key("moe.expert_size", int),
            "num_local_experts": Key("moe.num_experts", int, 128),
            "num_experts_per_tok": Key("moe.top_k", int, 4),
        },
        fixed=_LLAMA_FIXED
        | {
            "attention_bias": (True,),
            "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,),
        },
        biases=(),
        windows=Windows("period", default=128, period=2),
        theta=150_000.0,
        # Copies of other keys.
        unread=_LOSS | {"experts_per_token", "initial_context_length"},
    ),
    "bert": _BERT,
    "roberta": dataclasses.replace(
        _BERT,
        architecture="RobertaForMaskedLM",
        rows=rows.ROBERTA,
        prefix="roberta.",
        padding="pad_token_id",
    ),
}
"""Families by `model_type`."""
