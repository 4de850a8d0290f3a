"""A server of a Llama of random weights, or the same generator without a server.

python examples/benchmarks/serve_ours.py [--shape=8b] [--clients=128]
python examples/benchmarks/serve_ours.py --engine [--shape=8b] [--clients=128]

The clients of `serve_clients.py` run in a process of their own. With `--engine` the
generator gets the same prompts as arrays, all at once, and `prefill_seconds` is the
time of one prompt with one token.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import call_timing
import jax
import serve_clients
import timing
import tokenizers
from decode_cases import SHAPES
from decode_ours import RandomDecoder

from zjax.data.prompts import Prompts
from zjax.data.tokenizer import load_tokenizer
from zjax.data.tokenizer_files import TOKENIZER_NAME
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling
from zjax.serve import Settings, serving

PREFILL_WARM_UPS, PREFILLS = 3, 7
END = "<|end|>"
SERVER_SECONDS = 600.0


def make_tokenizer(vocab_size):
    """A tokenizer of made-up words, which decodes as tokenizers of large models do."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    for number in range(len(vocabulary), vocab_size - 1):
        vocabulary[f"Ġw{number}"] = number
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([END])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        library.save(str(folder / TOKENIZER_NAME))
        settings = json.dumps({"eos_token": END})
        (folder / "tokenizer_config.json").write_text(settings)
        return load_tokenizer(folder / TOKENIZER_NAME)


def measure_server(generator, load, given):
    """Metrics that the clients print."""
    settings = Settings(port=0, request_seconds=SERVER_SECONDS)
    script = pathlib.Path(serve_clients.__file__)
    names = "clients", "num_given", "num_new", "num_warm_ups", "num_rounds"
    flags = [f"--{name}={getattr(given, name)}" for name in names]
    with serving(generator, settings) as address:
        flags += [f"--address={address}", f"--vocab_size={load.vocab_size}"]
        command = [sys.executable, str(script), *flags]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    metrics = json.loads(found.stdout.rpartition("RESULT ")[2])
    return {name: metrics[name] for name in metrics if " " in name}


def measure_engine(generator, load, given):
    """Metrics of the generator alone, by the names that the clients give them."""
    one = Sampling(max_new_tokens=1)
    seconds = [
        write(generator, load.prompts(1), one)
        for _ in range(PREFILL_WARM_UPS + PREFILLS)
    ][PREFILL_WARM_UPS:]
    call_timing.note("prefill", seconds)
    metrics = {"idle first_seconds": timing.spread(seconds)}
    sampling = Sampling(max_new_tokens=load.num_new, end_ids=())
    for num_clients in map(int, given.clients.split(",")):
        seconds = [
            write(generator, load.prompts(num_clients), sampling)
            for _ in range(given.num_warm_ups + given.num_rounds)
        ][given.num_warm_ups :]
        call_timing.note(f"{num_clients} texts", seconds)
        num_tokens = num_clients * load.num_new
        rates = call_timing.rates(num_tokens, seconds)
        metrics[f"{num_clients} clients tokens/s"] = rates
    return metrics


def write(generator, prompts, sampling):
    """Seconds in which prompts get their texts."""
    start = time.perf_counter()
    texts = generator.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    assert {len(text.ids) for text in texts} == {sampling.max_new_tokens}
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--engine", action="store_true", help="no server")
    serve_clients.add_flags(parser)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    load = serve_clients.Load("", shape.vocab_size, given.num_given, given.num_new)
    length = given.num_given + given.num_new
    decoder = RandomDecoder(dataclasses.replace(shape, length=length))
    prompts = Prompts(make_tokenizer(shape.vocab_size))
    max_rows = max(map(int, given.clients.split(",")))
    with Generator(decoder, prompts=prompts, max_rows=max_rows) as generator:
        measure = measure_engine if given.engine else measure_server
        metrics = measure(generator, load, given)
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
