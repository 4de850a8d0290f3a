"""Texts of a small Llama on two cores, one after another: by llama.cpp, or by zjax.

python examples/benchmarks/client_decode.py [--by=q4_0] [--quick]

zjax computes in float32; llama.cpp reads the file that zjax exports, in the type that
`--by` names. Both take the most likely tokens, and a time is of a prompt with a text.
"""

import argparse
import itertools
import os
import tempfile
import time

import call_timing
import exported_model
import jax
import numpy as np
import timing

import zjax
from zjax.weights import gguf_file

NUM_GIVEN, NUM_NEW = 32, 128
NUM_CORES, NUM_WARM_UPS, NUM_ROUNDS = 2, 3, 5


def by_zjax(run, prompt, num_new):
    """Returns a function that writes a text by zjax."""
    generator = zjax.Generator(run, run.state, max_rows=1)
    sampling = zjax.Sampling(max_new_tokens=num_new)
    return lambda: generator.generate([prompt], sampling)[0].ids


def open_llama(path):
    """Opens a file by llama.cpp, without the copies of weights for tile instructions.

    Virtual machines announce these instructions (AMX) and end a program that uses them.
    """
    import llama_cpp.llama_cpp as library
    from llama_cpp import Llama

    make = library.llama_model_default_params

    def without_copies():
        params = make()
        params.use_extra_bufts = False
        return params

    library.llama_model_default_params = without_copies
    return Llama(str(path), n_ctx=512, n_threads=NUM_CORES, verbose=False)


def by_llama(path, prompt, num_new):
    """Returns a function that writes a text by llama.cpp."""
    model = open_llama(path)

    def write():
        model.reset()
        # No text ends before: the stream goes on after an end id.
        return [*itertools.islice(model.generate(prompt, temp=0.0), num_new)]

    return write


def time_texts(write, num_new):
    """Seconds of each text, after texts that warm up."""
    seconds = []
    for _ in range(NUM_WARM_UPS + NUM_ROUNDS):
        start = time.perf_counter()
        ids = write()
        seconds.append(time.perf_counter() - start)
        if len(ids) != num_new:
            raise SystemExit(f"{len(ids)} tokens came in place of {num_new}")
    print("first tokens", ids[:8], flush=True)
    return seconds[NUM_WARM_UPS:]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--by", choices=("zjax", *gguf_file.TYPES), default="zjax")
    parser.add_argument("--quick", action="store_true", help="a shape for a test")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    model = exported_model.MODEL | (exported_model.SMALL if given.quick else {})
    num_new = 8 if given.quick else NUM_NEW
    prompt = np.random.default_rng(0).integers(0, model["vocab_size"], NUM_GIVEN)
    packages, run = ["jax"], exported_model.make_run(model)
    if given.by == "zjax":
        seconds = time_texts(by_zjax(run, prompt.tolist(), num_new), num_new)
    else:
        packages.append("llama-cpp-python")
        with tempfile.TemporaryDirectory() as folder:
            store = exported_model.save(run, f"{folder}/run")
            path = exported_model.export(store, given.by, folder)
            seconds = time_texts(by_llama(path, prompt.tolist(), num_new), num_new)
    call_timing.note(f"a text by {given.by}", seconds)
    metrics = {
        "tokens_per_second": call_timing.rates(num_new, seconds),
        "text_seconds": timing.spread(seconds),
    }
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=tuple(packages))


if __name__ == "__main__":
    main()
