"""A Llama of random weights on the host, of which blocks come to the device in turn.

python examples/benchmarks/host_decode_ours.py [--shape=7b] [--num_rows=128]

All rows get a token from each pass, which reads all blocks from the host once. A round
is some passes, from the arrival of one on the host to a later one.
"""

import argparse
import dataclasses
import math

import call_timing
import decode_ours
import jax
from decode_cases import SHAPES, random_prompts

from zjax.config import load_config
from zjax.generation.sizes import NUM_CHUNKS
from zjax.models.build import make_model
from zjax.run.build import start_run

NUM_GIVEN, TOKENS_PER_ROUND = 32, 8
WARM_UP_ROUNDS, ROUNDS = 2, 5
ON_HOST = {"kind": "pinned_host", "parameter_memory": "pinned_host"}


def make_run(shape):
    """A run that trains nothing, with blocks on the host."""
    optimizer = {"rule": {"kind": "sgd", "b1": 0.0}, "clip_norm": math.inf}
    config = load_config(
        {
            "num_steps": 1,
            "global_batch_size": jax.device_count(),
            "data": {"source": "synthetic", "length": 64},
            "zero": {"stage": 2, "offload": ON_HOST},
            "precision": {"master_dtype": "bfloat16", "on_nonfinite": "update"},
            "optimizer": optimizer,
        }
    )
    model = dataclasses.replace(decode_ours.model_settings(shape), remat="full")
    config = dataclasses.replace(config, model=model)
    return start_run(config, make_model(config), None)


def measure(shape, num_rows):
    """Bytes of blocks per second, and tokens per second."""
    run = make_run(shape)
    decoder = run.decoder(run.state)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(decoder.stored))
    # The first rows also get tokens while the prompts of the last are read.
    num_new = num_rows // NUM_CHUNKS + TOKENS_PER_ROUND * (2 + WARM_UP_ROUNDS + ROUNDS)
    with jax.set_mesh(run.mesh):
        length = NUM_GIVEN + num_new
        engine = decode_ours.make_static_engine(decoder, num_rows, length)
        prompts = random_prompts(num_rows, NUM_GIVEN, shape.vocab_size)
        rows = decode_ours.add_rows(engine, prompts, [num_new] * num_rows)
        while min(len(row.generated) for row in rows) == 0:
            engine.step()
        seconds = [
            decode_ours.time_tokens(engine, rows, TOKENS_PER_ROUND)
            for _ in range(WARM_UP_ROUNDS + ROUNDS)
        ]
    call_timing.note(f"{num_bytes / 1e9:.1f} GB of blocks, a pass", seconds)
    seconds = seconds[WARM_UP_ROUNDS:]
    return {
        "host bytes/s": call_timing.rates(num_bytes, seconds),
        "tokens/s": call_timing.rates(num_rows, seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--num_rows", type=int, default=128)
    given = parser.parse_args()
    metrics = measure(SHAPES[given.shape], given.num_rows)
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
