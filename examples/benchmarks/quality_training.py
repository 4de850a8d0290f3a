"""Trains methods with several seeds, and evaluates them on held-out text as they go."""

import dataclasses
import sys
import time

import jax
import numpy as np

import zjax
from zjax.data import find_evaluation
from zjax.schedule.lengths import make_tokens
from zjax.train.average import with_part

SMALL_GPT = {
    "num_layers": 8,
    "embed_size": 512,
    "num_heads": 8,
    "layers_per_scan": 1,
    "remat": "none",
}
"""A model of 30M parameters, of which several programs take minutes per run."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A method, compiled before it trains.

    Args:
        run: Its run.
        num_points: Evaluations of a training.
        part: Weights to evaluate, as for `zjax.evaluate`.
    """

    run: zjax.Run
    num_points: int
    part: str = "auto"

    def start(self, seed):
        config, run = dataclasses.replace(self.run.config, seed=seed), self.run
        tx = zjax.make_optimizer(config, run.model)
        return zjax.init_state(jax.random.key(seed), run.model, tx, run.plan, config)

    def train(self, seed):
        """Validation losses, tokens and seconds of training until then, and all losses.

        The host waits for the devices at evaluations alone, which take no seconds.
        """
        run, state = self.run, self.start(seed)
        config = dataclasses.replace(run.config, seed=seed)
        held_out, consumed = (
            find_evaluation(config, run.batch_placement),
            make_tokens(config),
        )
        every = max(1, config.num_steps // self.num_points)
        losses, tokens, seconds, trained, spent = {}, [], [], [], 0.0
        with zjax.make_loader(
            config, run.batch_placement, num_batches=config.num_steps
        ) as batches:
            start = time.perf_counter()
            for step, batch in enumerate(batches, start=1):
                state, metrics = run.step(state, batch)
                trained.append(metrics["loss"])
                if step % every == 0 or step == config.num_steps:
                    jax.block_until_ready(state.step)
                    spent += time.perf_counter() - start
                    losses[step] = self.evaluate(held_out, state)
                    tokens.append(int(consumed.sum_until(step)))
                    seconds.append(round(spent, 3))
                    start = time.perf_counter()
        found = {"losses": losses, "tokens": tokens, "seconds": seconds}
        return found, np.array(jax.device_get(trained))

    def evaluate(self, held_out, state):
        weights = with_part(state, self.part)
        means = held_out.mean(lambda batch: self.run.evaluate(weights, batch))
        return means["eval_loss"]


def make_run(config):
    model = zjax.make_model(config)
    return zjax.make_run(config, model, zjax.make_optimizer(config, model))


def train_missing(methods, seeds, records, make_method, describe=lambda *found: {}):
    """Trains what has no record yet: all seeds of a method with one compilation.

    Args:
        methods: Names.
        seeds: Seeds of each.
        records: `quality_records.Records`.
        make_method: `make_method(name)` is a `Method`.
        describe: `describe(method, losses)` is more to record, from all losses.
    """
    for name in methods:
        known = records.read()
        missing = [seed for seed in seeds if (name, seed) not in known]
        method = make_method(name) if missing else None
        for seed in missing:
            found, trained = method.train(seed)
            more = describe(method, trained)
            records.write(name, seed, **found, **more)
            final, spent = [*found["losses"].values()][-1], found["seconds"][-1]
            told = "".join(f", {value} {key}" for key, value in more.items())
            line = f"{name}, seed {seed}: {final:.4f}{told}, {spent:.0f} s"
            print(line, file=sys.stderr, flush=True)
