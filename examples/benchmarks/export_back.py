"""Files of a small Llama as transformers reads them, and as zjax reads them back.

Both compute logits of the same tokens in float32, and neither rounds what enters
matrices where a layout asks for it: a number that the last bit rounds otherwise changes
all that follows. Sizes are of the files of weights, over the bytes of codes, scales
and plain arrays.

python examples/benchmarks/export_back.py [--quick] [--layouts=w4a16,q8_0]
"""

import argparse
import tempfile

import call_timing
import exported_model
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from zjax.huggingface import model_settings

NUM_ROWS = 4


def weight_bytes(path):
    """Bytes of the files with weights."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def our_logits(path, tokens):
    """Logits of a run that starts from the files."""
    start = {"checkpoint": {"init_from": str(path)}}
    run = exported_model.make_run(model_settings(path), start)
    return np.asarray(run.model.bind(run.state.master, {})(jnp.asarray(tokens)))


def their_logits(path, tokens):
    """Logits of transformers."""
    if path.is_dir():
        folder, config = path, transformers.AutoConfig.from_pretrained(path)
        codes = getattr(config, "quantization_config", None) or {"config_groups": {}}
        for group in codes["config_groups"].values():
            group["input_activations"] = None
        options = {"config": config}
    else:
        folder, options = path.parent, {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **options
    )
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def measure(name, store, model, folder, length):
    """Measures a layout; returns how far readers and bytes are apart."""
    path = exported_model.export(store, name, folder)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model["vocab_size"], (NUM_ROWS, length), np.int32)
    ours, theirs = our_logits(path, tokens), their_logits(path, tokens)
    same = (ours.argmax(-1) == theirs.argmax(-1)).mean()
    found = {
        "difference": float(np.abs(ours - theirs).max()),
        "tokens": float(1 / same),
        "size": weight_bytes(path) / exported_model.closed_form(name, model),
    }
    print(name, found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a shape for a test")
    parser.add_argument("--layouts", default=",".join(exported_model.BITS))
    given = parser.parse_args()
    model = exported_model.MODEL | (exported_model.SMALL if given.quick else {})
    length = 16 if given.quick else 64
    with tempfile.TemporaryDirectory() as folder:
        store = exported_model.save(exported_model.make_run(model), f"{folder}/run")
        found = [
            measure(name, store, model, folder, length)
            for name in given.layouts.split(",")
        ]
    metrics = {f"worst {name}": max(x[name] for x in found) for name in found[0]}
    packages = "jax", "transformers", "compressed-tensors", "gguf"
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=packages)


if __name__ == "__main__":
    main()
