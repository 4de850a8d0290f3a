"""A Hugging Face checkpoint of random weights onto one device, over a plain read.

The files have the shape of Llama 3 8B and are made once. Both read them from the disk,
not from memory, in turn. Ours starts a run that trains adapters, in a process of its
own, whose host memory is looked at every hundredth of a second; its seconds are those
of `zjax.make_run`, with all that it compiles.

python examples/benchmarks/load_hf_speed.py [--directory=runs/load_hf] [--rounds=3]
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import call_timing
import llama
import ml_dtypes
import numpy as np
import timing
from safetensors.numpy import save_file

DIRECTORY = pathlib.Path("runs/load_hf")
SHAPE = llama.Llama()
SHARD_BYTES = 5 * 10**9
BLOCK_BYTES = 16 << 20
RANK = 16


def make_checkpoint(directory, shape):
    """Writes shards, their index and a config, unless they are there."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    rng, part, files = np.random.default_rng(0), {}, {}
    shapes = tensor_shapes(shape)
    for name, size in shapes.items():
        bits = rng.integers(1 << 16, size=size, dtype=np.uint16)
        # Values of either sign below 1/64: their sign and last bits are random.
        part[name] = ((bits & 0x807F) | 0x3C00).view(ml_dtypes.bfloat16)
        is_full = sum(x.nbytes for x in part.values()) >= SHARD_BYTES
        if is_full or len(files) + len(part) == len(shapes):
            file = f"model-{len(set(files.values())):05d}.safetensors"
            save_file(part, directory / file)
            files |= dict.fromkeys(part, file)
            part = {}
    config = shape.settings() | {"model_type": "llama", "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    index.write_text(json.dumps({"weight_map": files}))


def tensor_shapes(shape):
    """Shapes by name, as `LlamaForCausalLM` has them."""
    head = shape.embed_size // shape.num_heads
    width, inner = shape.embed_size, shape.mlp_size
    queries, keys = shape.num_heads * head, shape.num_kv_heads * head
    block = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    named = {"model.embed_tokens": (shape.vocab_size, width)}
    for layer in range(shape.num_layers):
        named |= {f"model.layers.{layer}.{name}": x for name, x in block.items()}
    named |= {"model.norm": (width,)}
    if not shape.settings()["tie_word_embeddings"]:
        named |= {"lm_head": (shape.vocab_size, width)}
    return {f"{name}.weight": x for name, x in named.items()}


def read_plainly(directory):
    """Seconds to read all files, one after the other, into one block of memory."""
    block, start = bytearray(BLOCK_BYTES), time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - start


def forget(directory):
    """Drops the files from the memory of the system."""
    for path in directory.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def load(directory):
    """Starts a run from the checkpoint; prints its seconds and host memory."""
    import jax

    import zjax
    from zjax.huggingface import model_settings

    settings = {
        "global_batch_size": 1,
        "zero": {"stage": 0},
        "model": model_settings(directory),
        "lora": {"rank": RANK},
        "checkpoint": {"init_from": str(directory)},
    }
    config = zjax.load_config(settings)
    model = zjax.make_model(config)
    device = jax.devices()[0]
    jax.block_until_ready(jax.device_put(np.zeros(8), device))
    with HostMemory() as memory:
        start = time.perf_counter()
        tx = zjax.make_optimizer(config, model)
        run = zjax.make_run(config, model, tx, devices=[device])
        jax.block_until_ready(run.state)
        seconds = time.perf_counter() - start
    found = {
        "seconds": seconds,
        "host_bytes": memory.peak,
        "device": device.device_kind,
    }
    print(json.dumps(found))


class HostMemory:
    """The most memory of this process beyond what it had, without pages of files."""

    def __enter__(self):
        self._first = self.peak = self._bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        self.peak -= self._first

    def _watch(self):
        while not self._done.wait(0.01):
            self.peak = max(self.peak, self._bytes())

    def _bytes(self):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        kilobytes = (int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
        return 1024 * sum(kilobytes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--directory", type=pathlib.Path, default=DIRECTORY)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", action="store_true")
    given = parser.parse_args()
    if given.loads:
        return load(given.directory)
    make_checkpoint(given.directory, SHAPE)
    largest = max(x.stat().st_size for x in given.directory.glob("*.safetensors"))
    ratios, plain, found = [], [], []
    for _ in range(given.rounds):
        forget(given.directory)
        plain.append(read_plainly(given.directory))
        forget(given.directory)
        command = [sys.executable, *sys.argv, "--loads"]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        found.append(json.loads(output.splitlines()[-1]))
        ratios.append(found[-1]["seconds"] / plain[-1])
    metrics = {
        "seconds_over_plain_read": timing.spread(ratios),
        "host_over_largest_shard": timing.spread(
            [each["host_bytes"] / largest for each in found]
        ),
        "seconds": timing.spread([each["seconds"] for each in found]),
        "plain_seconds": timing.spread(plain),
    }
    call_timing.print_result(metrics, device=found[-1]["device"], packages=("jax",))


if __name__ == "__main__":
    main()
