"""Steps of GRPO on a decoder of random weights, by zjax on one device.

python examples/benchmarks/rl_ours.py [--shape=1p5b] [--exact] [--reference]
python examples/benchmarks/rl_ours.py --supervised

A step is timed from the first text to the last updated weight. Before the last update
the trainer's log-probabilities of the tokens are computed, and compared with those of
the passes that drew the tokens. `--exact` asks for the same bits in all batches,
`--reference` adds a divergence from the weights that the run starts from, and
`--supervised` trains on as many given tokens in place of texts of the model.
"""

import dataclasses
import math
import pathlib
import sys
import tempfile
import time

import call_timing
import jax
import numpy as np
import rl_cases as cases
import timing
from decode_ours import model_settings
from load_hf_speed import make_checkpoint

import zjax
from zjax.rl import Trainer, kl_k3, logprobs_of
from zjax.run.bench import peak_bytes
from zjax.settings.mappings import to_mapping
from zjax.typing import IGNORED

MANY_STEPS = 1_000
"""Steps of the run, of which a few are taken: nothing is written after a step."""


def make_config(given, directory):
    """Settings of a run, without checkpoints, evaluations and pictures."""
    shape, workload = cases.SHAPES[given.shape], cases.workload_of(given)
    model = dataclasses.replace(shape, length=workload.length)
    settings = {
        "directory": directory,
        "num_steps": MANY_STEPS,
        "global_batch_size": workload.num_texts,
        "microbatch_size": workload.microbatch_size,
        "zero": {"stage": 0},
        "model": to_mapping(model_settings(model)) | {"tied_head": True},
        "data": {"source": "synthetic"},
        "optimizer": {
            "rule": {"kind": "adamw", "moment_dtype": "bfloat16"},
            "peak_learning_rate": cases.LEARNING_RATE,
            "schedule": {"kind": "constant", "num_warmup_steps": 0},
        },
        "evaluation": {"every_steps": 0, "num_batches": 0},
        "checkpoint": {"every_steps": 0},
        "observe": {"sinks": (), "log_every_steps": MANY_STEPS, "plot": False},
    }
    return zjax.load_config(settings)


def with_texts(config, given):
    """Adds texts, rewards and the objective to settings."""
    workload = cases.workload_of(given)
    changes = {
        "rl.objective": "grpo",
        "rl.rollout.num_prompts": workload.num_prompts,
        "rl.rollout.num_samples": workload.num_samples,
        "rl.rollout.max_new_tokens": workload.num_new,
        "rl.rollout.temperature": workload.temperature,
        "rl.rewards": [{"function": "rl_cases:reward"}],
    }
    return zjax.load_config(config, changes)


class Steps:
    """Takes steps of a trainer, and notes how long they take.

    Args:
        trainer: Trainer of texts, or of given tokens.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.rollout_seconds: list[float] = []
        self.update_seconds: list[float] = []

    def draw(self):
        """Returns the batch of a step: of texts with rewards."""
        start = time.perf_counter()
        batch = jax.block_until_ready(next(self.trainer.loader))
        self.rollout_seconds.append(time.perf_counter() - start)
        cases.progress(f"a rollout took {self.rollout_seconds[-1]:.2f} s")
        return batch

    def update(self, batch):
        """Updates the weights."""
        start, trainer = time.perf_counter(), self.trainer
        trainer.state, metrics = trainer.run.step(trainer.state, batch)
        jax.block_until_ready(trainer.state)
        self.update_seconds.append(time.perf_counter() - start)
        cases.progress(f"an update took {self.update_seconds[-1]:.2f} s")
        if not math.isfinite(float(metrics["loss"])):
            sys.exit(f"the loss is {metrics['loss']}")

    def describe(self, num_untimed, num_texts):
        """Metrics of all steps but the first, each of a number of texts."""
        halves = self.rollout_seconds[num_untimed:], self.update_seconds[num_untimed:]
        seconds = [drawn + learned for drawn, learned in zip(*halves, strict=True)]
        return {
            "step_seconds": timing.spread(seconds),
            "rollout_seconds": timing.spread(halves[0]),
            "update_seconds": timing.spread(halves[1]),
            "texts_per_second": call_timing.rates(num_texts, seconds),
        }


def compare(trainer, batch):
    """Metrics of the difference between sampler and trainer, before an update."""
    temperature = trainer.config.rl.rollout.temperature
    own = logprobs_of(trainer.run, trainer.state, batch, temperature=temperature)
    mask = batch["targets"] != IGNORED
    kl = np.asarray(kl_k3(batch["rl"]["logprobs"], own, mask), np.float64)
    mask = np.asarray(mask)
    own, sampler = (np.asarray(x)[mask] for x in (own, batch["rl"]["logprobs"]))
    gaps = np.abs(np.float64(own) - np.float64(sampler))
    metrics = {
        "num_compared": int(mask.sum()),
        "sampler_kl": float(kl[mask].mean()),
        "largest_gap": float(gaps.max()),
        "largest_ratio": math.exp(gaps.max()),
        "different_share": float((own != sampler).mean()),
        "mean_logprob": float(np.mean(sampler)),
    }
    cases.progress(f"compared: {metrics}")
    return metrics


def take_steps(trainer, given):
    """Metrics of some steps after others that are not timed."""
    steps, metrics = Steps(trainer), {}
    number = given.num_warm_ups + given.num_steps
    for left in reversed(range(number)):
        batch = steps.draw()
        if not left and "rl" in batch:
            metrics = compare(trainer, batch)
        num_tokens = int((batch["targets"] != IGNORED).sum())
        steps.update(batch)
    metrics |= steps.describe(given.num_warm_ups, cases.workload_of(given).num_texts)
    return metrics | {"new_tokens": num_tokens}


def make_trainer(given, directory):
    """Makes the trainer of the command line."""
    config = make_config(given, directory)
    if given.exact:
        config = zjax.load_config(config, "precision.batch_invariant=true")
    devices = jax.devices()[:1]
    if given.supervised:
        return zjax.Trainer(config, devices=devices)
    shape, workload = cases.SHAPES[given.shape], cases.workload_of(given)
    number = given.num_warm_ups + given.num_steps
    prompts = workload.prompts(shape.vocab_size, number)
    config = with_texts(config, given)
    if given.reference:
        start = pathlib.Path(directory) / "start"
        make_checkpoint(start, dataclasses.replace(shape, length=workload.length))
        cases.progress("a checkpoint to start from is written")
        changes = {"rl.reference": "loss", "checkpoint.init_from": str(start)}
        config = zjax.load_config(config, changes)
    rows = [{"prompt": prompt} for prompt in prompts]
    return Trainer(config, prompts=rows, devices=devices)


def main() -> None:
    parser = cases.make_parser("1p5b")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--supervised", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(given, directory)
        cases.progress("the weights are there")
        metrics = take_steps(trainer, given)
        trainer.close()
    peak = peak_bytes(jax.local_devices())
    metrics |= {"peak_bytes": peak} if peak else {}
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
