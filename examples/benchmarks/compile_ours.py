"""How long a generator takes to its first token, and what it compiles, from nothing.

python examples/benchmarks/compile_ours.py [--quick]

The weights are on the device; no compiled program is read from a disk. Then more and
longer prompts come, of a shape that is new, and the same number and length once more:
the difference of the two is what the shape costs. At last so many rows are written
that the passes of all sizes have run.
"""

import argparse
import contextlib
import dataclasses
import time

import call_timing
import jax
from decode_cases import SHAPES, random_prompts
from decode_ours import RandomDecoder

from zjax.generation.generator import Generator
from zjax.generation.passes import run_pass, run_steps
from zjax.generation.sampling import Sampling

SHAPE = dataclasses.replace(SHAPES["8b"], num_layers=48)
QUICK = SHAPES["tiny"]
MAX_ROWS, NUM_NEW = 64, 8
FIRST_LENGTH = 100
"""Tokens of the first prompt."""
SECOND = 5, 700
"""Rows, and tokens of each prompt, of the shape that is new."""
ALL_ROWS = (1, 8, 32, 64)
LEAST_SECONDS = 1e-3
"""What a clock of the host tells apart."""
COMPILED = "/jax/core/compile/backend_compile_duration"
PASSES = run_pass.__name__, run_steps.__name__
"""Names of the programs of passes; the others set a row, or make pages."""


@contextlib.contextmanager
def noted_programs():
    """Yields a list that gets the name of each program that is compiled inside."""
    names = []

    def listen(event, duration_secs, **about):
        if event == COMPILED:
            names.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def write(generator, num_rows, num_given):
    """Seconds in which prompts of a shape get their texts."""
    # A seed for each call: prompts that are known would be found in the cache.
    size = generator.config.vocab_size
    prompts = random_prompts(num_rows, num_given, size, seed=time.monotonic_ns())
    start = time.perf_counter()
    generator.generate(prompts, Sampling(max_new_tokens=NUM_NEW))
    return time.perf_counter() - start


def measure(shape):
    """Metrics of a shape."""
    decoder = RandomDecoder(shape)
    metrics = {}
    with noted_programs() as names:
        start = time.perf_counter()
        with Generator(decoder, max_rows=MAX_ROWS) as generator:
            [prompt] = random_prompts(1, FIRST_LENGTH, shape.vocab_size)
            news = iter(generator.submit(prompt, Sampling(max_new_tokens=NUM_NEW)))
            assert len(next(news).ids) == 1
            metrics["cold_seconds"] = time.perf_counter() - start
            call_timing.note("first token", [metrics["cold_seconds"]])
            for _ in news:
                pass
            seconds = [write(generator, *SECOND) for _ in range(2)]
            call_timing.note("the new shape", seconds[:1])
            extra = max(seconds[0] - seconds[1], LEAST_SECONDS)
            metrics["second_seconds"] = extra
            for num_rows in ALL_ROWS:
                write(generator, num_rows, FIRST_LENGTH)
    passes = [name for name in names if any(each in name for each in PASSES)]
    assert passes, f"no program of {names} is a pass"
    metrics |= {"num_programs": len(passes), "num_all_programs": len(names)}
    call_timing.note(f"{len(passes)} passes of {len(names)} programs, in all", [0])
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a model for a CPU")
    given = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    metrics = measure(QUICK if given.quick else SHAPE)
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
