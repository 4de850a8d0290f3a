"""Writes the checkpoints of tests/golden/huggingface, with the library they come from.

Run:    python tests/golden/make_huggingface.py
Needs:  pip install torch transformers safetensors
        (torch 2.13.0 and transformers 5.24.0 wrote those that are there)
"""

import pathlib

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "huggingface"
VOCAB_SIZE, LENGTH, NUM_NEW = 61, 12, 6
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEEPSEEK = SIZES | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-3,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 3,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
FAMILIES = {
    "llama": transformers.LlamaConfig(
        **SIZES,
        head_dim=6,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
    ),
    "llama_biases": transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=4, sliding_window=None),
    "mistral_window": transformers.MistralConfig(**SIZES, head_dim=4, sliding_window=5),
    "gemma2": transformers.Gemma2Config(
        **SIZES | {"num_hidden_layers": 3},
        head_dim=6,
        pad_token_id=None,
        query_pre_attn_scalar=9,
        sliding_window=5,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": transformers.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=6,
        pad_token_id=None,
        query_pre_attn_scalar=6,
        sliding_window=5,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": {
                "rope_type": "linear",
                "rope_theta": 1000.0,
                "factor": 4.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=6, tie_word_embeddings=True),
    "llama3": transformers.LlamaConfig(
        **SIZES,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 50.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "smollm3": transformers.SmolLM3Config(
        **SIZES | {"num_hidden_layers": 5},
        pad_token_id=None,
        no_rope_layer_interval=2,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
    ),
    "phi3": transformers.Phi3Config(
        **SIZES, head_dim=8, pad_token_id=0, partial_rotary_factor=0.75
    ),
    "phi3_long": transformers.Phi3Config(
        **SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1},
        pad_token_id=0,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=18,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 50.0,
            "short_factor": [1.0, 1.3, 1.7],
            "long_factor": [1.5, 3.0, 6.0],
        },
    ),
    "olmo2": transformers.Olmo2Config(**SIZES, pad_token_id=None),
    "mixtral": transformers.MixtralConfig(
        **SIZES | {"intermediate_size": 12}, num_local_experts=4
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 3},
        head_dim=6,
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        mlp_only_layers=[0],
    ),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES | {"intermediate_size": 12},
        head_dim=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        swiglu_limit=7.0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 50.0,
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **DEEPSEEK,
        q_lora_rank=6,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 50.0,
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "original_max_position_embeddings": 16,
        },
    ),
    "deepseek_v3_whole_queries": transformers.DeepseekV3Config(
        **DEEPSEEK | {"num_hidden_layers": 2},
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        rope_interleave=False,
        norm_topk_prob=False,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
ENCODER_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ENCODERS = {
    "bert": transformers.BertConfig(**ENCODER_SIZES, max_position_embeddings=32),
    "roberta": transformers.RobertaConfig(
        **ENCODER_SIZES, max_position_embeddings=35, pad_token_id=2, type_vocab_size=1
    ),
}
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0},
}
"""Other rotations of the first checkpoint, and what its model makes of them."""
SHORT = {"dynamic": 8}
"""Longest sequence before the scaling, if it is not that of the checkpoint."""
LONGER = {"phi3_long": 20}
"""Tokens of a second text, which rotations of a first one do not fit."""
SHARD_SIZES = {"llama": "12KB"}
"""Largest file of a checkpoint in several."""


def make(name: str, config: transformers.PretrainedConfig) -> None:
    """Writes a checkpoint, and what its model makes of some tokens."""
    model = make_model(transformers.AutoModelForCausalLM, name, config)
    write_expected(model, FOLDER / name / "expected.npz")
    if name in LONGER:
        path = FOLDER / name / "expected_longer.npz"
        write_expected(model, path, LONGER[name])


def make_encoder(name: str, config: transformers.PretrainedConfig) -> None:
    """Writes a checkpoint, and its logits of tokens with types and padding."""
    model = make_model(transformers.AutoModelForMaskedLM, name, config)
    lengths = torch.tensor([LENGTH, LENGTH - 5])
    is_token = torch.arange(LENGTH)[None] < lengths[:, None]
    with torch.no_grad():
        tokens = torch.randint(3, VOCAB_SIZE, (2, LENGTH))
        tokens = torch.where(is_token, tokens, config.pad_token_id)
        types = torch.randint(0, config.type_vocab_size, (2, LENGTH))
        given = {"attention_mask": is_token.long(), "token_type_ids": types}
        logits = model(tokens, **given).logits
    expected = {"tokens": tokens, "token_types": types, "lengths": lengths}
    expected = {n: x.numpy() for n, x in expected.items()}
    np.savez(FOLDER / name / "expected.npz", logits=logits.numpy(), **expected)


def make_model(
    kind: type, name: str, config: transformers.PretrainedConfig
) -> torch.nn.Module:
    """Writes a checkpoint of random weights."""
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for path, x in model.named_parameters():
            is_scale = x.ndim == 1 and path.endswith("weight")
            is_scale &= "gemma" not in name
            x.copy_(is_scale + 0.3 * torch.randn(x.shape))
        for path, x in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                x.copy_(0.3 * torch.randn(x.shape))
    model.save_pretrained(FOLDER / name, max_shard_size=SHARD_SIZES.get(name, "1GB"))
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    return model


def make_scaled(kind: str) -> None:
    """Writes what the first checkpoint computes with other rotations."""
    config = transformers.AutoConfig.from_pretrained(FOLDER / "llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 50.0, **SCALINGS[kind]}
    config.max_position_embeddings = SHORT.get(kind, config.max_position_embeddings)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER / "llama", config=config
    )
    torch.manual_seed(0)
    write_expected(model.eval(), FOLDER / "llama" / f"expected_{kind}.npz")


def write_expected(
    model: torch.nn.Module, path: pathlib.Path, length: int = LENGTH
) -> None:
    """Writes some tokens, their logits, and the text that follows them."""
    with torch.no_grad():
        tokens = torch.randint(0, VOCAB_SIZE, (2, length))
        logits = model(tokens).logits
        text = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
        )
    expected = {"tokens": tokens, "logits": logits, "text": text}
    np.savez(path, **{n: x.numpy() for n, x in expected.items()})


if __name__ == "__main__":
    for name, config in FAMILIES.items():
        make(name, config)
    for name, config in ENCODERS.items():
        make_encoder(name, config)
    for kind in SCALINGS:
        make_scaled(kind)
