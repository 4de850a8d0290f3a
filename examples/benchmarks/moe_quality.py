"""What smaller mixtures of experts lose: validation losses of four kinds, by seed.

All train on the source of Python's standard library, byte by byte, with equal batches:
a mixture (MoE), one with fewer experts and residual branches (PR-MoE), and a PR-MoE of
fewer layers, alone and with the PR-MoE of its seed as teacher.

python examples/benchmarks/moe_quality.py [--seeds=3] [setting=value ...]
"""

import argparse
import dataclasses
import sys
import tempfile
import time

import call_timing
import jax
import timing

import zjax
from zjax.data import find_evaluation
from zjax.run.batch import StepInputs
from zjax.run.compiler import use_program_cache
from zjax.run.teacher import Teacher
from zjax.schedule.training import TrainingSchedule
from zjax.settings.schema import Distill
from zjax.sharding.memory import num_params

SETTINGS = {
    "num_steps": 500,
    "global_batch_size": 64,
    "zero": {"stage": 0},
    "optimizer": {"schedule": {"num_warmup_steps": 50}, "peak_learning_rate": 0.0015},
    "model": {
        "num_layers": 6,
        "embed_size": 256,
        "num_heads": 4,
        "max_length": 256,
        "remat": "none",
        "loss_chunk_tokens": 0,
        "moe": {"every": 2, "num_experts": 64},
    },
    "evaluation": {"num_batches": 32},
}
MODELS = {
    "MoE": {},
    "PR-MoE": {"model.moe.num_experts": (16, 16, 32), "model.moe.residual": True},
    "student": {
        "model.num_layers": 4,
        "model.moe.num_experts": (16, 32),
        "model.moe.residual": True,
    },
}
DISTILLED = "student of the PR-MoE"


def make_config(name, *more):
    return zjax.load_config(SETTINGS, MODELS[name], *more)


def report(text):
    print(text, file=sys.stderr, flush=True)


def make_run(config):
    model = zjax.make_model(config)
    return zjax.make_run(config, model, zjax.make_optimizer(config, model))


def load_batches(run, seed):
    """The batches of a training, on the device."""
    config = dataclasses.replace(run.config, seed=seed)
    with zjax.make_loader(config, run.batch_placement) as loader:
        return [next(loader) for _ in range(config.num_steps)]


def train(run, seed, batches):
    """The state after all steps, and its validation loss."""
    start = time.perf_counter()
    tx = zjax.make_optimizer(run.config, run.model)
    key = jax.random.key(seed)
    state = zjax.init_state(key, run.model, tx, run.plan, run.config)
    for batch in batches:
        state, _ = run.step(state, batch)
    loss = validate(run, state)
    report(f"seed {seed}: {loss:.4f} after {time.perf_counter() - start:.1f} s")
    return state, loss


def validate(run, state):
    """Cross-entropy of held-out text, without the losses of routers."""
    found = find_evaluation(run.config, run.batch_placement)
    means = found.mean(lambda batch: run.evaluate(state, batch))
    return means["eval_loss"] - means["eval_auxiliary_loss"]


def with_teacher(run, path):
    """The run of a student with a teacher; its compiled programs are shared."""
    distill = Distill(teacher=path)
    config = dataclasses.replace(run.config, distill=distill)
    teacher = Teacher(distill, config, run.plan, run.model)
    inputs = StepInputs(TrainingSchedule(config), run.plan.replicated, teacher)
    step = dataclasses.replace(run.step, inputs=inputs)
    return dataclasses.replace(run, step=step)


def measure(num_seeds, overrides):
    runs = {name: make_run(make_config(name, *overrides)) for name in MODELS}
    losses = {name: [] for name in (*MODELS, DISTILLED)}
    for seed in range(num_seeds):
        batches = load_batches(runs["MoE"], seed)
        for name, run in runs.items():
            report(name)
            state, loss = train(run, seed, batches)
            losses[name].append(loss)
            if name == "PR-MoE":
                teacher = state
        report(DISTILLED)
        with tempfile.TemporaryDirectory() as directory:
            zjax.save(directory, teacher, runs["PR-MoE"])
            student = with_teacher(runs["student"], directory)
            losses[DISTILLED].append(train(student, seed, batches)[1])

    def ratios(one, other):
        pairs = zip(losses[one], losses[other], strict=True)
        return timing.spread([x / y for x, y in pairs])

    parameters = {name: num_params(run.plan) for name, run in runs.items()}
    return {
        "pr_moe_over_moe": ratios("PR-MoE", "MoE"),
        "distilled_over_alone": ratios(DISTILLED, "student"),
        "parameter_share": parameters["PR-MoE"] / parameters["MoE"],
        "losses": losses,
        "parameters": parameters,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    use_program_cache()
    found = measure(given.seeds, given.settings)
    device = jax.devices()[0].device_kind
    call_timing.print_result(found, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
