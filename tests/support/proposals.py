"""Known shapes with an open mesh, and machines that are not here."""

import pathlib

from zjax.config import load_config
from zjax.estimate.trial import Machine

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
ON_DEVICE = {
    "zero.offload": None,
    "model.remat": "elementwise",
    "microbatch_size": 1,
}
SHAPES = {
    "gpt 1.5b": ("gpt2_1p5b", {}),
    "gpt 6.7b": ("gpt_6p7b", {}),
    "llama 8b": ("llama_8b", {}),
    "llama 8b, long": ("llama_8b_long_sequence", {}),
    "llama 30b": ("llama_30b_nvme", ON_DEVICE),
    "llama 30b, offload": ("llama_30b_nvme", {}),
    "llama 70b": (
        "llama_8b",
        {
            "model.num_layers": 80,
            "model.embed_size": 8192,
            "model.mlp_size": 28_672,
            "model.num_heads": 64,
        },
    ),
}


def config_of(shape, *changes):
    name, own = SHAPES[shape]
    return load_config(CONFIGS / f"{name}.py", {"mesh": "auto"}, own, *changes)


def machine_of(num_devices, gb, per_host=8):
    return Machine(num_devices, min(num_devices, per_host), gb * 1e9)
