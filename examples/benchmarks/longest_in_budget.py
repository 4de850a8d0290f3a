"""The longest sequence whose step costs no more than a dense one of a given length.

Neither in time nor, by the compiler's account, in memory. Lengths are doubled until one
costs more; then the one halfway is tried.

python examples/benchmarks/longest_in_budget.py --base=16384
    --dense=model.attention=cudnn,model.sparsity.mode=fixed configs/bert_sparse_16k.py
    microbatch_size=1 global_batch_size=0

Settings of `--dense` are those of the dense model alone. Given after the config as
well, they make the search one over dense attention.
"""

import argparse
import dataclasses
import gc
from collections.abc import Sequence

from jax.errors import JaxRuntimeError
from largest_model import NO_ROOM

from zjax.bench import Measurement, measure, result_line
from zjax.config import load_config
from zjax.errors import PlanError

MOST_TIMES = 64
"""The base, where the search ends."""


def trial(given: argparse.Namespace, length: int, *more: str) -> Measurement | None:
    """A few steps; None where they do not fit on the device."""
    lengths = (f"model.max_length={length}", f"data.length={length}")
    config = load_config(given.config, *given.settings, *lengths, *more)
    gc.collect()  # arrays of the last trial
    try:
        found = measure(config, num_warm_up=2, num_rounds=1)
    except (JaxRuntimeError, PlanError) as error:
        if not NO_ROOM.search(str(error)):
            raise
        print(f"{length}: no room", flush=True)
        return None
    print(f"{length}: {_cost(found)}", flush=True)
    return found


def search(given: argparse.Namespace) -> dict:
    """What the longest sequence within the budget measures, and the budget."""
    budget = trial(given, given.base, *given.dense)
    if budget is None:
        raise SystemExit(f"the dense model has no room for {given.base} tokens")

    def within(length: int) -> bool:
        found = tried[length] = trial(given, length)
        return found is not None and all(
            x <= y for x, y in zip(_cost(found), _cost(budget), strict=True)
        )

    tried: dict[int, Measurement | None] = {}
    length = 2 * given.base
    while within(length):
        if length >= MOST_TIMES * given.base:
            raise SystemExit(f"{length} tokens still cost less: no end of the search")
        length *= 2
    low = length // 2
    if low == given.base and not within(low):
        raise SystemExit(f"{low} tokens already cost more than the dense model's")
    halfway = low + low // 2
    longest = halfway if within(halfway) else low
    seconds, num_bytes = _cost(budget)
    found = tried[longest]
    assert found is not None
    return dataclasses.asdict(found) | {
        "length": longest,
        "failed_length": min(x for x in tried if x > longest),
        "budget_seconds": seconds,
        "budget_bytes": num_bytes,
    }


def _cost(found: Measurement) -> tuple[float, int]:
    if found.predicted_peak_bytes is None:
        raise SystemExit("the compiler does not say how much memory a step takes here")
    return found.step_seconds.median, found.predicted_peak_bytes


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--base", type=int, required=True)
    parser.add_argument("--dense", type=lambda text: text.split(","), default=[])
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*")
    print(result_line(search(parser.parse_args(words))))


if __name__ == "__main__":
    main()
