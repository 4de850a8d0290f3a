"""Steps that drop tokens or layers, over steps of all tokens in all layers.

Sizes and their weights in the mean step of a run are those of `kept_schedule`. All
kinds of steps take turns, in several rounds.

python examples/benchmarks/dropping_steps.py --num_layers=24 --embed_size=1024
    --num_heads=16 --vocab_size=50304 --length=2048 --microbatch_size=8
"""

import statistics
import time

import call_timing
import jax
import numpy as np
import timing
from kept_schedule import kept_tokens, mean_of_run
from shape import Shape, make_parser, shape_of

import zjax
from zjax.typing import Dropping, StepBatch

ROUNDS, STEPS_PER_ROUND = 5, 8
LAYER_DROP_STEPS = 24
"""Steps of a round that draw their layers: the more, the less the draws of a round
differ from their mean."""
FORMS = {"layerwise": False, "span": True}


def make_run(shape: Shape, **more):
    settings = {
        "num_steps": 1000,
        "global_batch_size": shape.microbatch_size,
        "zero": {"stage": 0},
        "model": {
            "num_layers": shape.num_layers,
            "embed_size": shape.embed_size,
            "num_heads": shape.num_heads,
            "vocab_size": shape.vocab_size,
            "max_length": shape.length,
        },
        **more,
    }
    config = zjax.load_config(settings)
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    return zjax.make_run(config, model, tx, devices=jax.devices()[:1])


def make_batch(run, shape: Shape):
    rng = np.random.default_rng(0)
    size = (shape.microbatch_size, shape.length + 1)
    tokens = rng.integers(shape.vocab_size, size=size, dtype=np.int32)
    return run.step.place_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})


class Steps:
    """Steps of one run; its state passes from one kind of steps to the next."""

    def __init__(self, shape: Shape, **settings):
        self.run = make_run(shape, **settings)
        self.batch, self.state = make_batch(self.run, shape), self.run.state

    def train(self, dropping: Dropping | None):
        """Takes one step, which drops as the settings say if `dropping` is None."""
        if dropping is None:
            return self.run.step(self.state, self.batch)
        with jax.set_mesh(self.run.mesh):
            batch = StepBatch(self.batch, dropping)
            return self.run.step.executor.train(self.state, batch)

    def seconds(self, dropping: Dropping | None, number: int) -> float:
        """Seconds per step of a round."""
        start = time.perf_counter()
        for _ in range(number):
            self.state, metrics = self.train(dropping)
        loss = float(metrics["loss"])
        seconds = (time.perf_counter() - start) / number
        if not np.isfinite(loss):
            raise SystemExit(f"the loss is {loss}")
        return seconds


def measure(shape: Shape):
    """Ratios of each kind of steps, round by round."""
    sizes = kept_tokens(shape.length)
    kinds = {
        (form, n): Dropping(n, once) for form, once in FORMS.items() for n in sizes
    }
    kinds = {("whole", 0): Dropping()} | kinds
    steps = Steps(shape)
    rounds = [
        {name: steps.seconds(kind, number) for name, kind in kinds.items()}
        for number in (1, *[STEPS_PER_ROUND] * ROUNDS)  # the first one compiles
    ][1:]
    ratios = {
        form: [
            mean_of_run([each[form, n] for n in sizes], each["whole", 0])
            for each in rounds
        ]
        for form in FORMS
    }
    found = {form: timing.spread(ratios[form]) for form in FORMS}
    found |= {
        f"{form}_speed": timing.spread([1 / ratio for ratio in ratios[form]])
        for form in FORMS
    }
    medians = {
        f"{form} {n}".removesuffix(" 0"): statistics.median(x[form, n] for x in rounds)
        for form, n in kinds
    }
    return found, medians


def measure_layer_drop(shape: Shape):
    """Ratios of steps whose last layer runs with a probability of a half."""
    whole = Steps(shape)
    dropped = Steps(shape, layer_drop={"theta": 0.5, "gamma": 100.0})
    ratios = []
    for number in (2, *[LAYER_DROP_STEPS] * ROUNDS):
        ratios.append(dropped.seconds(None, number) / whole.seconds(None, number))
    return timing.spread(ratios[1:])


def main():
    shape = shape_of(make_parser("Steps that drop tokens or layers").parse_args())
    found, medians = measure(shape)
    found["layer_drop"] = measure_layer_drop(shape)
    call_timing.print_result(
        found | {"step_seconds": medians},
        device=jax.devices()[0].device_kind,
        packages=("jax",),
    )


if __name__ == "__main__":
    main()
