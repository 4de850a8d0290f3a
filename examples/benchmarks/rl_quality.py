"""Runs of examples/rl with several tasks and seeds, and what GRPO adds to their starts.

A run is a process, and devices have several at once, as a small model leaves a device
idle. Each finished run is a line of `<directory>/runs.jsonl`, and is not run again; the
picture is `<directory>/curves.png`.

python examples/benchmarks/rl_quality.py [--tasks=sums,reverse] [--seeds=0,1,2]
    [--num_devices=1] [--at_once=3] [--directory=runs/rl_learns] [setting=value ...]
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import time

import call_timing
import matplotlib.pyplot as plt
import numpy as np
import quality_records
import timing
from contests.turns import find_machine
from rl_learns import TASKS

DIRECTORY = pathlib.Path("runs/rl_learns")
EXAMPLE = pathlib.Path(__file__).parents[1] / "rl" / "train.py"
SIZES = ("--num_traces=300000", "--num_prompts=20000", "--num_held_out=4096")
SETTINGS = (
    "model.num_layers=4",
    "model.embed_size=256",
    "precision.compute_dtype=bfloat16",
    "supervised:global_batch_size=128",
    "supervised:optimizer.peak_learning_rate=1e-3",
    "supervised:optimizer.schedule.final_fraction=0.0",
    "supervised:evaluation.every_steps=0",
    "grpo:num_steps=200",
    "grpo:optimizer.peak_learning_rate=1e-4",
    "grpo:rl.reward_processes=1",
    "grpo:rl.evaluation_prompts=",
    "grpo:rl.evaluation_samples=1",
)
STEPS = {"sums": 10_000, "countdown": 5_000, "reverse": 5_000}
"""Steps of a start until it no longer rises."""
EARLY, START, END = "supervised, four fifths", "supervised", "grpo"
"""Stages of a report card."""
LEAST, MOST = 0.2, 0.6
"""Pass@1 of a start that solves enough to learn from, and leaves much to learn."""
MOST_RISE = 0.01
"""Rise of pass@1 over the last fifth of a start that has learnt what it can."""
TAIL_LINES = 15


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--num_devices", type=int, default=1)
    parser.add_argument("--at_once", type=int, default=3, help="runs on a device")
    parser.add_argument("--directory", type=pathlib.Path, default=DIRECTORY)
    parser.add_argument("settings", nargs="*", help="settings or sizes of the example")
    given, sizes = parser.parse_known_args(words)
    given.sizes = [*SIZES, *sizes]
    given.tasks = given.tasks.split(",")
    given.seeds = [int(seed) for seed in given.seeds.split(",")]
    if unknown := set(given.tasks) - set(TASKS):
        parser.error(f"tasks={min(unknown)} is unknown; use {', '.join(TASKS)}")
    return given


def train_missing(given, records):
    """Runs what has no record yet, some runs at once on each device."""
    known, places = records.read(), queue.SimpleQueue()
    wanted = [(task, seed) for seed in given.seeds for task in given.tasks]
    missing = [key for key in wanted if key not in known]
    for number in range(given.at_once * given.num_devices):
        places.put(number % given.num_devices)

    def train_one(task, seed):
        device = places.get()
        try:
            variables = environment(device, given.at_once)
            return train(task, seed, words_of(task, given), variables)
        finally:
            places.put(device)

    with concurrent.futures.ThreadPoolExecutor(places.qsize()) as threads:
        runs = {threads.submit(train_one, *key): key for key in missing}
        failures = []
        for run in concurrent.futures.as_completed(runs):
            if isinstance(failure := run.exception(), SystemExit):
                failures.append(str(failure))
                continue
            found = run.result()
            records.write(*runs[run], **found)
            print(describe(*runs[run], found), file=sys.stderr, flush=True)
    if failures:
        raise SystemExit("\n".join(failures))


def words_of(task, given):
    """Lists sizes and settings of a task; later ones count."""
    steps = f"supervised:num_steps={STEPS[task]}"
    return [*given.sizes, steps, *SETTINGS, *given.settings]


def environment(device, at_once):
    """Variables of a process that shares a device with others."""
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": str(device),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / at_once:.2f}",
    }


def train(task, seed, words, variables):
    """Runs the example in a process; returns the report card, and rewards by step.

    A run that is killed begins anew, so that seconds are those of a whole run.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--task={task}", f"--directory={folder}", *words, f"seed={seed}"]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), *words],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
            raise SystemExit(f"{task}, seed {seed} failed:\n{tail}")
        output = pathlib.Path(folder, task)
        lines = (output / END / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        return {
            "stages": json.loads((output / "card.json").read_text()),
            "rewards": [(x["step"], x["reward"]) for x in steps if "reward" in x],
            "seconds": round(seconds, 1),
        }


def describe(task, seed, found):
    """Tells the rates of the stages of a run in a line."""
    rates = [
        f"{stage} {each['pass_at_1']:.1%} (of eight {each['pass_at_8']:.1%})"
        for stage, each in found["stages"].items()
    ]
    return f"{task}, seed {seed}: {', '.join(rates)}, {found['seconds']:.0f} s"


def find_faults(task, seed, found):
    """Yields why a start shows nothing of what is learned from rewards."""
    early, start = (found["stages"][x]["pass_at_1"] for x in (EARLY, START))
    if not LEAST <= start <= MOST:
        yield f"{task}, seed {seed}: a start of {start:.1%} is not in 20 to 60 %"
    if start - early >= MOST_RISE:
        yield f"{task}, seed {seed}: the start still rises, {early:.1%} to {start:.1%}"


def compare(records, tasks, seeds):
    """Least rise of pass@1 in points, and ratios of pass@8, of tasks with all seeds.

    Raises:
        SystemExit: A start is too good, too bad, or no plateau.
    """
    found = {}
    for task in tasks:
        runs = records.read_all(task, seeds)
        if runs is None:
            continue
        pairs = list(zip(seeds, runs, strict=True))
        if faults := [x for seed, run in pairs for x in find_faults(task, seed, run)]:
            raise SystemExit("\n".join(faults))
        starts, ends = ([run["stages"][x] for run in runs] for x in (START, END))
        both = list(zip(starts, ends, strict=True))
        rises = [100 * (end["pass_at_1"] - start["pass_at_1"]) for start, end in both]
        found[f"{task}_points"] = min(rises)
        ratios = [end["pass_at_8"] / start["pass_at_8"] for start, end in both]
        found[f"{task}_any_of_eight"] = timing.spread(ratios)
    return found


def plot(records, path):
    """Draws the share of right texts while GRPO learns, mean and range of seeds."""
    curves = {}
    for (task, _), run in sorted(records.items()):
        curves.setdefault(task, []).append(run["rewards"])
    figure, panel = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for task, runs in curves.items():
        quality_records.draw(panel, task, np.array(runs))
    panel.set_xlabel("step of GRPO")
    panel.set_ylabel("share of right texts")
    panel.legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(words=None):
    given = parse(words)
    machine = find_machine(os.environ)
    setups = {
        task: {"device": machine.device, "settings": words_of(task, given)}
        for task in TASKS
    }
    records = quality_records.Records(given.directory / "runs.jsonl", setups)
    train_missing(given, records)
    known = records.read()
    plot(known, given.directory / "curves.png")
    slowest = max(run["seconds"] for run in known.values())
    found = compare(records, given.tasks, given.seeds)
    call_timing.print_result(
        found | {"num_devices": given.num_devices, "slowest_run_seconds": slowest},
        device=machine.device,
        packages=("jax",),
    )


if __name__ == "__main__":
    main()
