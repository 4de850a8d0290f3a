"""A Llama of random weights that zjax decodes, with weights of 16, 8 and 4 bits.

python examples/benchmarks/narrow_decode_ours.py [--kinds=bf16,int8] [--quick]

Passes of the engine read one token of each row after another, behind a few keys:
the question is what the weights cost. All models are on the device at once, and passes
of the kinds take turns, so that no kind has another clock. The ratios of all kinds to
the first are noted as well.
"""

import argparse
import statistics
import time

import call_timing
import jax
import numpy as np
from decode_cases import SHAPES
from decode_ours import RandomDecoder

from zjax.generation.dtypes import Dtypes
from zjax.generation.passes import Rows
from zjax.generation.plan import NUM_STEPS, Pieces
from zjax.generation.sampling import GREEDY, rows_of
from zjax.generation.sizes import PAGE_SIZE
from zjax.ops.narrow import WEIGHT_DTYPES, WeightDtype

KINDS: dict[str, WeightDtype] = {
    "bf16" if kind == "compute" else kind: kind for kind in WEIGHT_DTYPES
}
BATCHES = 1, 64, 128
NUM_KEYS = 128
"""Tokens of each row before a pass."""


class Pass:
    """A pass that gives each row of a batch some tokens, again and again.

    Args:
        decoder: Model, as `Generator` takes it.
        batch: Rows.
    """

    def __init__(self, decoder, batch):
        length = NUM_KEYS + NUM_STEPS
        num_pages = -(-length // PAGE_SIZE)
        table = np.zeros((batch + 1, num_pages), np.int32)
        table[:-1] = 1 + np.arange(batch * num_pages).reshape(batch, num_pages)
        sizes = {"num_slots": batch, "max_length": length, "page_size": PAGE_SIZE}
        self._passes = decoder.passes(**sizes, num_pages=1 + batch * num_pages)

        def full(number):
            return np.full(batch, number, np.int32)

        given = np.full(batch + 1, NUM_KEYS, np.int32)
        sampling = rows_of([GREEDY] * (batch + 1), [0] * (batch + 1))
        rows = Rows(table, given, given + NUM_STEPS + 1, sampling)
        drafts = np.zeros((batch, 0), np.int32)
        lanes = np.arange(batch, dtype=np.int32), full(NUM_KEYS - 1), full(NUM_STEPS)
        piece = Pieces(*lanes, np.ones(batch, bool), drafts)
        self._inputs = jax.device_put(rows), [piece], [1]

    def compile(self):
        """Starts to compile the program."""
        self._passes.compile(*self._inputs, NUM_STEPS)

    def start(self):
        """Sends the pass to the device."""
        return self._passes.read(*self._inputs, NUM_STEPS)


def time_in_turn(passes):
    """Seconds per token of each pass, over rounds in which all take turns."""
    for each in passes.values():
        each.compile()
    num_calls = {}
    for name, each in passes.items():
        for _ in range(call_timing.WARM_UP_CALLS):
            jax.block_until_ready(each.start())
        start = time.perf_counter()
        jax.block_until_ready(each.start())
        seconds = time.perf_counter() - start
        num_calls[name] = max(1, round(call_timing.ROUND_SECONDS / seconds))
    found = {name: [] for name in passes}
    for _ in range(call_timing.ROUNDS):
        for name, each in passes.items():
            start = time.perf_counter()
            for _ in range(num_calls[name]):
                last = each.start()
            jax.block_until_ready(last)
            seconds = time.perf_counter() - start
            found[name].append(seconds / num_calls[name] / NUM_STEPS)
    return found


def metric_of(kind, batch):
    """Name of a rate among the results."""
    return f"{kind} b={batch} tokens/s"


def measure(shape, kinds):
    """Tokens per second of some kinds, with all batches."""
    decoders = {name: RandomDecoder(shape, Dtypes(KINDS[name])) for name in kinds}
    metrics = {}
    for batch in BATCHES:
        passes = {name: Pass(decoder, batch) for name, decoder in decoders.items()}
        found = time_in_turn(passes)
        first = statistics.median(found[kinds[0]])
        for name, seconds in found.items():
            metrics[metric_of(name, batch)] = call_timing.rates(batch, seconds)
            ratio = first / statistics.median(seconds)
            label = f"{name}, {batch} rows, {ratio:.2f} times {kinds[0]}, a token"
            call_timing.note(label, seconds)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a shape for a CPU")
    parser.add_argument("--kinds", default=",".join(KINDS), help="by commas")
    given = parser.parse_args()
    metrics = measure(SHAPES["tiny" if given.quick else "7b"], given.kinds.split(","))
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
