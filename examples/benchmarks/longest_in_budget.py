"""The longest sequence whose step costs no more than a dense one of a given length.

In time, against dense attention as it runs fastest; and in memory, by the compiler's
account, against dense attention that writes the scores of all pairs down: the fastest
keeps none. Lengths are doubled until one costs more; then the one halfway is tried.

python examples/benchmarks/longest_in_budget.py --base=16384
    --dense=model.attention=cudnn,model.attention.pattern=fixed
    --written=model.attention=xla,model.attention.pattern=fixed
    configs/bert_sparse_16k.py microbatch_size=1 global_batch_size=0

Settings of `--dense` and `--written` are those of the dense models alone.
"""

import argparse
import gc
from collections.abc import Callable, Sequence

from jax.errors import JaxRuntimeError
from largest_model import NO_ROOM, peak_bytes

from zjax.config import Config, load_config
from zjax.errors import PlanError
from zjax.processes.programs import result_line
from zjax.run.bench import measure

MOST_TIMES = 64
"""The base, where the search ends."""


def config_of(given: argparse.Namespace, length: int, *more: str) -> Config:
    lengths = (f"model.max_length={length}", f"data.length={length}")
    return load_config(given.config, *given.settings, *lengths, *more)


def seconds(config: Config) -> float | None:
    """Of a step; None where it does not fit on the device."""
    gc.collect()  # arrays of the last trial
    try:
        return measure(config, num_warm_up=2, num_rounds=1).step_seconds.median
    except (JaxRuntimeError, PlanError) as error:
        if not NO_ROOM.search(str(error)):
            raise
        return None


COSTS: dict[str, Callable[[Config], float | None]] = {
    "time": seconds,
    "memory": peak_bytes,
}


def search(given: argparse.Namespace, kind: str, dense: Sequence[str]) -> dict:
    """The longest sequence within the cost of the dense model, and that cost."""

    def cost(length: int, *more: str) -> float | None:
        found = COSTS[kind](config_of(given, length, *more))
        print(f"{kind}, {length}{' dense' * bool(more)}: {found}", flush=True)
        return found

    budget = cost(given.base, *dense)
    if budget is None:
        raise SystemExit(f"the dense model has no room for {given.base} tokens")

    def within(length: int) -> bool:
        found = cost(length)
        if found is None or found > budget:
            failed.append(length)
        return length not in failed

    failed: list[int] = []
    length = 2 * given.base
    while within(length):
        if length >= MOST_TIMES * given.base:
            raise SystemExit(f"{length} tokens still cost less: no end of the search")
        length *= 2
    low = length // 2
    if low == given.base and not within(low):
        raise SystemExit(f"{low} tokens already cost more than the dense model's")
    halfway = low + low // 2
    return {
        f"length_in_{kind}": halfway if within(halfway) else low,
        f"failed_length_in_{kind}": min(failed),
        f"budget_of_{kind}": budget,
    }


def main(words: Sequence[str] | None = None) -> None:
    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--base", type=int, required=True)
    parser.add_argument("--dense", type=listed, required=True)
    parser.add_argument("--written", type=listed, required=True)
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args(words)
    found = search(given, "time", given.dense) | search(given, "memory", given.written)
    print(result_line(found))


if __name__ == "__main__":
    main()
