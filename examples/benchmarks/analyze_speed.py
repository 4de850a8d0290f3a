"""Samples per second of the offline analyzer, with two processes and with one.

python examples/benchmarks/analyze_speed.py [--rounds=3] [--text=DIR]
"""

import argparse
import pathlib
import platform
import tempfile
import time

import call_timing
import package_text
import timing

import zjax
from zjax.data import source
from zjax.data.analyze import analyze

TEXT = pathlib.Path("runs/package_bytes")
METRICS = ("voc", "compression")
LENGTH = 32
WARM_UP_ROUNDS = 1


def samples_per_second(config, rows, num_processes):
    """Of a whole run, which includes the start of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        analyze(
            rows,
            folder,
            METRICS,
            vocab_size=source.make_tokenizer(config).vocab_size,
            digest=source.digest_samples(config.data, rows),
            num_processes=num_processes,
        )
        return len(rows) / (time.perf_counter() - start)


def measure(text, num_rounds):
    package_text.prepare_text(text, tokenizer="bytes")
    settings = {"data": {"source": "tokens", "path": str(text)}}
    config = zjax.load_config(settings, {"model.max_length": LENGTH})
    rows = source.open_rows(config, "train")
    rounds = [
        {number: samples_per_second(config, rows, number) for number in (1, 2)}
        for _ in range(WARM_UP_ROUNDS + num_rounds)
    ][WARM_UP_ROUNDS:]
    return {
        "two_over_one": timing.spread([each[2] / each[1] for each in rounds]),
        "samples_per_second": {
            number: timing.spread([each[number] for each in rounds])
            for number in (1, 2)
        },
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=pathlib.Path, default=TEXT)
    given = parser.parse_args()
    found = measure(given.text, given.rounds)
    device = platform.processor() or platform.machine()
    call_timing.print_result(found, device=device, packages=("numpy",))


if __name__ == "__main__":
    main()
