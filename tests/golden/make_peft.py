"""Writes the adapters of tests/golden/peft, with the library they come from.

Run:    python tests/golden/make_peft.py
Needs:  pip install torch transformers peft safetensors
        (torch 2.13.0, transformers 5.24.0 and peft 0.21.2 wrote those that are there)
"""

import pathlib

import numpy as np
import peft
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent
ADAPTERS = {
    "rslora": {
        "base": "llama",
        "r": 4,
        "lora_alpha": 3,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    },
    "dora": {
        "base": "llama",
        "r": 2,
        "lora_alpha": 6,
        "use_dora": True,
        "target_modules": "all-linear",
    },
    "saved": {
        "base": "llama",
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"],
    },
    "joined": {
        "base": "phi3",
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["qkv_proj", "gate_up_proj"],
    },
    "joined_dora": {
        "base": "gpt2",
        "r": 2,
        "lora_alpha": 6,
        "use_dora": True,
        "target_modules": ["c_attn"],
    },
}


def write(name, base, **settings):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER / "huggingface" / base
    )
    settings = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, settings).eval()
    for path, x in model.named_parameters():
        if "lora_" in path:
            torch.nn.init.normal_(x, std=0.2)
            x.data += 1.0 if "magnitude" in path else 0.0
        elif "modules_to_save" in path:
            x.data += torch.nn.init.normal_(torch.empty_like(x), std=0.3)
    model.peft_config["default"].base_model_name_or_path = base
    folder = FOLDER / "peft" / name
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    tokens = np.random.default_rng(0).integers(0, 61, (2, 12))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=logits)


if __name__ == "__main__":
    for each, values in ADAPTERS.items():
        write(each, **values)
