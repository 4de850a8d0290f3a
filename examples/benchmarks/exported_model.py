"""A Llama of 124M random parameters as a run, and the files that it goes out as."""

import math
import pathlib

import jax

import zjax
from zjax.checkpoint.export import export_huggingface
from zjax.checkpoint.export_gguf import export_gguf
from zjax.checkpoint.store import Store
from zjax.weights import gguf_file
from zjax.weights.quantized import SCHEMES

MODEL = {
    "num_layers": 16,
    "embed_size": 768,
    "mlp_size": 2048,
    "num_heads": 12,
    "num_kv_heads": 4,
    "vocab_size": 32_768,
    "max_length": 512,
    "norm": "rms_norm",
    "norm_eps": 1e-5,
    "positions": {"kind": "rotary", "max_positions": 512},
    "activation": "swiglu",
    "use_bias": False,
    "tied_head": True,
}
SMALL = {
    "num_layers": 1,
    "embed_size": 128,
    "mlp_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 97,
}
"""A shape for a test."""
BITS = {
    **{"w4a16": 4 + 16 / 128, "w8a8": 8, "fp8": 8, "bf16": 16},
    **{"q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "mxfp4": 4.25},
}
"""Bits of a weight with the scales of a group; an output has one scale of 16 bits in
`w8a8` and `fp8`."""
SETTINGS = {
    "global_batch_size": 1,
    "data": {"source": "synthetic"},
    "precision": {"compute_dtype": "float32"},
}


def make_run(model, *more):
    """A run in float32 on one device."""
    config = zjax.load_config(SETTINGS | {"model": model}, *more)
    made = zjax.make_model(config)
    tx = zjax.make_optimizer(config, made)
    return zjax.make_run(config, made, tx, devices=jax.devices()[:1])


def save(run, directory):
    """Saves the weights of a run as a checkpoint; returns the checkpoints."""
    zjax.save(directory, run.state, run)
    return Store(str(directory))


def closed_form(name, model):
    """Bytes of codes, scales and plain arrays of a layout."""
    width, inner = model["embed_size"], model["mlp_size"]
    keys = width // model["num_heads"] * model["num_kv_heads"]
    shapes = [(width, width), (width, keys), (width, keys), (width, width)]
    shapes += [(width, inner), (width, inner), (inner, width)]
    bits = sum(BITS[name] * math.prod(shape) for shape in shapes)
    if name in SCHEMES and not SCHEMES[name].group:
        bits += 16 * sum(outputs for _, outputs in shapes)
    norm_bits = 16 if name in SCHEMES else 32
    plain_bits = 16 * model["vocab_size"] * width + norm_bits * width
    return (model["num_layers"] * (bits + 2 * norm_bits * width) + plain_bits) / 8


def export(store, name, folder):
    """Writes the file or the directory of a layout; returns the path."""
    path = pathlib.Path(folder) / name
    if name in gguf_file.TYPES:
        path = path.with_suffix(".gguf")
        export_gguf(store, str(path), quantize=name)
    else:
        assert name in SCHEMES, name
        export_huggingface(store, str(path), dtype="bfloat16", quantize=name)
    return path
