"""Families of Hugging Face checkpoints: keys of a config.json, and tensors.

Every key that changes the outputs of a model is either a setting of zjax or must have
the one value that zjax computes. Any other key is known, or unknown and reported.

A family whose mathematics zjax has is one entry of `FAMILIES`, with rows of tensors
where names differ, and a checkpoint in tests/golden/huggingface.
"""

import dataclasses

from zjax.settings import choices, schema
from zjax.settings.choices import KIND
from zjax.weights import rows
from zjax.weights.family import DROPOUTS, ROTARY, Family, Key, Windows

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
    "value_head": False,
}
"""Settings of a family without special features."""
_LEARNED_CONSTANT = _PLAIN | {
    "norm": "layer_norm",
    "positions": {"kind": "learned", "first": 0},
    "num_kv_heads": 0,
    "head_size": 0,
    "use_bias": True,
    "attention_bias": "use_bias",
}
"""Settings of a family with learned positions, and with biases."""
_NO_BIAS = {"use_bias": False, "attention_bias": "use_bias"}
# Defaults, here and below, are defaults of transformers' config classes, since a
# config.json may leave out such values.
_LLAMA = Family(
    architecture="LlamaForCausalLM",
    rows=rows.LLAMA,
    prefix="model.",
    buffers=r".*\.rotary_emb\.inv_freq",
    constant=_PLAIN | {"norm": "rms_norm", "positions": ROTARY, "activation": "swiglu"},
    keys={
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
    },
    fixed={"hidden_act": ("silu", "swish")},
    biases=("attention_bias", "mlp_bias"),
)
_BIAS_FALSE = {"attention_bias": (False,), "mlp_bias": (False,)}


def _dropouts(outputs: str, embedding: str, attention: str) -> dict[str, str]:
    return dict(zip(DROPOUTS, (outputs, embedding, attention), strict=True))


def _soft_caps(attention: float | None, logits: float | None) -> dict[str, Key]:
    """Keys of soft caps; arguments are the defaults, where None means no cap."""
    names = ("attention_soft_cap", attention), ("logit_soft_cap", logits)
    keys = [Key(name, float, default, is_nullable=True) for name, default in names]
    return dict(
        zip(("attn_logit_softcapping", "final_logit_softcapping"), keys, strict=True)
    )


_GEMMA = dataclasses.replace(
    _LLAMA.derived(
        "Gemma2ForCausalLM",
        rows=rows.GEMMA,
        constant={
            "norm_position": "both",
            "zero_centered_norm": True,
            "activation": "geglu",
            "scaled_embedding": True,
        },
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        keys={"query_pre_attn_scalar": Key("query_scale_size", int, 256)}
        | _soft_caps(attention=50.0, logits=30.0),
        biases=("attention_bias",),
        windows=Windows("period", default=4096, period=2),
        # transformers reads `hidden_activation` of Gemma, not `hidden_act`.
        unread=frozenset(
            {"hidden_act", "cache_implementation", "_sliding_window_pattern"}
        ),
    ),
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    },
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
    constant=_LEARNED_CONSTANT | {"kind": "encoder", "tied_head": True},
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
    "mistral": _LLAMA.derived(
        "MistralForCausalLM",
        constant=_NO_BIAS,
        defaults={"num_key_value_heads": 8},
        fixed=_BIAS_FALSE,
        biases=(),
        windows=Windows("all", default=4096),
    ),
    "qwen2": _LLAMA.derived(
        "Qwen2ForCausalLM",
        constant={"use_bias": False, "attention_bias": "inputs"},
        defaults={"num_key_value_heads": 32},
        biases=(),
        windows=Windows("switch", default=4096),
    ),
    "qwen3": _LLAMA.derived(
        "Qwen3ForCausalLM",
        constant={"query_key_norm": True},
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        biases=("attention_bias",),
        windows=Windows("switch", default=4096),
    ),
    "smollm3": _LLAMA.derived(
        "SmolLM3ForCausalLM",
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
        fixed={"use_sliding_window": (False,)},
        theta=2_000_000.0,
        unrotated_every=4,
        unread=frozenset({"sliding_window"}),
    ),
    "phi3": _LLAMA.derived(
        "Phi3ForCausalLM",
        rows=rows.PHI3,
        constant=_NO_BIAS,
        defaults={"rms_norm_eps": 1e-5},
        fixed=_BIAS_FALSE,
        biases=(),
        windows=Windows("all"),
        is_partial=True,
        # Early Phi-3 checkpoints call longrope "su" or "yarn".
        scalings={"su": "longrope", "yarn": "longrope"},
        dropouts=_dropouts("resid_pdrop", "embd_pdrop", "attention_dropout"),
    ),
    "olmo2": _LLAMA.derived(
        "Olmo2ForCausalLM",
        rows=rows.OLMO2,
        constant={
            "norm_position": "output",
            "query_key_norm": True,
            "query_key_norm_scope": "heads",
        },
        defaults={"rms_norm_eps": 1e-5},
        biases=("attention_bias",),
    ),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA.derived(
        "Gemma3ForCausalLM",
        constant={"query_key_norm": True},
        keys=_soft_caps(attention=None, logits=None),
        windows=Windows("period", default=4096, period=6),
        theta=1_000_000.0,
        local_theta=10_000.0,
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        rows=rows.GPT2,
        prefix="transformer.",
        buffers=r".*\.attn\.(masked_)?bias",
        constant=_LEARNED_CONSTANT,
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
    "mixtral": _LLAMA.derived(
        "MixtralForCausalLM",
        rows=rows.MIXTRAL,
        constant={**_NO_BIAS, "moe": _MIXTURE},
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        keys={
            "intermediate_size": Key("moe.expert_size", int),
            "num_local_experts": Key("moe.num_experts", int, 8),
            "num_experts_per_tok": Key("moe.top_k", int, 2),
        },
        fixed={"router_jitter_noise": (0.0,)},
        biases=(),
        windows=Windows("all"),
        theta=1_000_000.0,
        unread=_LOSS,
    ),
    "qwen3_moe": _LLAMA.derived(
        "Qwen3MoeForCausalLM",
        rows=rows.QWEN3_MOE,
        constant={"query_key_norm": True, "moe": _MIXTURE},
        defaults={"num_key_value_heads": 4},
        keys={
            "moe_intermediate_size": Key("moe.expert_size", int, 768),
            "num_experts": Key("moe.num_experts", int, 128),
            "num_experts_per_tok": Key("moe.top_k", int, 8),
            "norm_topk_prob": Key("moe.normalise", bool, False),
        },
        fixed={"use_sliding_window": (False,)},
        biases=("attention_bias",),
        unread=_LOSS | {"sliding_window"},
        aliases={"num_local_experts": "num_experts"},
        has_steps=True,
    ),
    "deepseek_v3": _LLAMA.derived(
        "DeepseekV3ForCausalLM",
        rows=rows.DEEPSEEK_V3,
        constant={
            **_NO_BIAS,
            "head_size": 0,
            "latent": {},
            "moe": _DEEPSEEK_MOE,
        },
        # `head_dim` repeats the rotary size here.
        keys={
            "head_dim": None,
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
        fixed={
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
    "gpt_oss": _LLAMA.derived(
        "GptOssForCausalLM",
        rows=rows.GPT_OSS,
        # The config class scales by yarn unless a config.json says otherwise.
        is_scaled=True,
        constant={
            "activation": "clamped_swiglu",
            "use_bias": True,
            "attention_bias": "use_bias",
            "attention_sinks": True,
            "moe": _MIXTURE | {"router_bias": True},
        },
        defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
        keys={
            "intermediate_size": Key("moe.expert_size", int),
            "num_local_experts": Key("moe.num_experts", int, 128),
            "num_experts_per_tok": Key("moe.top_k", int, 4),
        },
        fixed={
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
    "roberta": _BERT.derived(
        "RobertaForMaskedLM",
        rows=rows.ROBERTA,
        prefix="roberta.",
        padding="pad_token_id",
    ),
}
