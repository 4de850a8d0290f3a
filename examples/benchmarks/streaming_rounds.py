r"""Seconds that the exchanges of a run with local steps add to its steps.

python examples/benchmarks/streaming_rounds.py configs/gpt2_diloco.py mesh.replica=2

Whole rounds alternate with as many steps of a run that exchanges nothing; nobody waits
within either. In one last round the host waits for each step, so that no exchange is
hidden behind the next step: what that adds is what exchanges cost in all.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence

import call_timing
import jax
import timing

import zjax
from zjax import config as zconfig
from zjax.run.bench import check_losses
from zjax.schedule.exchange import Rounds, make_exchanges
from zjax.sharding.describe import render_table

WARM_UP_ROUNDS = 3
TIMED_ROUNDS = 5


class Steps:
    """Steps of one run on one batch that is on the devices."""

    def __init__(self, config: zconfig.Config):
        trainer = zjax.Trainer(config)
        self._run, self._state = trainer.run, trainer.run.state
        self._batch = self._run.step.place_batch(next(iter(trainer.loader)))
        self.losses = []

    def take(self, number: int) -> float:
        """Seconds of some steps, from the first call until the devices are done."""
        start = time.perf_counter()
        for _ in range(number):
            self._state, metrics = self._run.step(self._state, self._batch)
            self.losses.append(metrics["loss"])
        jax.block_until_ready((self._state, self.losses))
        return time.perf_counter() - start


def without_exchange(config: zconfig.Config) -> zconfig.Config:
    """The same local steps in one round as long as the run."""
    rounds = dataclasses.replace(
        config.communication.rounds, num_steps=config.num_steps, num_fragments=1
    )
    communication = dataclasses.replace(config.communication, local_steps=rounds)
    return dataclasses.replace(config, communication=communication)


def added_by_exchanges(rounds: Rounds, seconds: Sequence[float]) -> float:
    """What the exchanges of a round add to its mean step.

    Args:
        rounds: The schedule.
        seconds: Of each step of a round, from the first one.

    Returns:
        Seconds above the median step that neither sends nor merges.
    """
    kinds = {}
    for step, each in enumerate(seconds, start=1):
        exchange = rounds.at(step)
        kind = exchange.sent is None, exchange.merged is None
        kinds.setdefault(kind, []).append(each)
    local = statistics.median(kinds.pop((True, True)))
    added = (len(x) * (statistics.median(x) - local) for x in kinds.values())
    return sum(added) / len(seconds)


def measure(config: zconfig.Config) -> dict:
    """Seconds per step, and what exchanges add to them."""
    rounds = make_exchanges(config)
    assert isinstance(rounds, Rounds)
    length = rounds.num_local_steps
    runs = Steps(config), Steps(without_exchange(config))
    pairs = [
        [run.take(length) / length for run in runs]
        for _ in range(WARM_UP_ROUNDS + TIMED_ROUNDS)
    ]
    steps, local = zip(*pairs[WARM_UP_ROUNDS:], strict=True)
    waited = added_by_exchanges(rounds, [runs[0].take(1) for _ in range(length)])
    check_losses([float(loss) for loss in runs[0].losses])
    mean = statistics.median(steps)
    exposed = max(mean - statistics.median(local), 1e-6)  # the clock tells no less
    return {
        "step_seconds": timing.spread([*steps]),
        "local_step_seconds": timing.spread([*local]),
        "exposed_seconds": exposed,
        "exposed_share": exposed / mean,
        "waited_seconds": waited,
    }


def describe(metrics: dict) -> str:
    """The metrics, and their share of a step."""
    mean = metrics["step_seconds"]["median"]
    lines = []
    for name, value in metrics.items():
        if not name.endswith("_seconds"):
            continue
        found = value if isinstance(value, dict) else timing.spread([value])
        numbers = [1e3 * found[part] for part in ("median", "min", "max")]
        lines.append(
            (name, *(f"{x:.3f}" for x in numbers), f"{found['median'] / mean:.2%}")
        )
    columns = ("milliseconds per step", "median", "min", "max", "of a step")
    return render_table(columns, lines, right=(1, 2, 3, 4))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    metrics = measure(zconfig.load_config(given.config, *given.settings))
    devices = jax.devices()
    call_timing.print_result(
        metrics | {"num_devices": len(devices)},
        device=devices[0].device_kind,
        packages=("jax",),
    )
    print(describe(metrics))


if __name__ == "__main__":
    main()
