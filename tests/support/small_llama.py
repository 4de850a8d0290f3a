"""A Hugging Face checkpoint of a tiny Llama over bytes, with a chat template."""

import numpy as np
from safetensors.numpy import save_file

from tests.support import tokens

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
SIZE, MLP_SIZE, VOCAB_SIZE = 16, 32, 256 + len(SPECIAL)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": MLP_SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 256,
}


def write(folder, *, max_length=2048, seed=0):
    """Writes the checkpoint with random weights."""
    tokens.write_checkpoint(
        folder,
        SPECIAL,
        config=CONFIG | {"max_position_embeddings": max_length},
        tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<|end|>"},
    )
    rng = np.random.default_rng(seed)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (VOCAB_SIZE, SIZE),
        "lm_head.weight": (VOCAB_SIZE, SIZE),
        "model.norm.weight": (SIZE,),
        f"{layer}.input_layernorm.weight": (SIZE,),
        f"{layer}.post_attention_layernorm.weight": (SIZE,),
        **{f"{layer}.self_attn.{x}_proj.weight": (SIZE, SIZE) for x in "qkvo"},
        f"{layer}.mlp.gate_proj.weight": (MLP_SIZE, SIZE),
        f"{layer}.mlp.up_proj.weight": (MLP_SIZE, SIZE),
        f"{layer}.mlp.down_proj.weight": (SIZE, MLP_SIZE),
    }
    arrays = {name: rng.normal(size=x).astype(np.float32) for name, x in shapes.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder
