"""What growing contexts, easy samples first and dropped tokens save in training.

All train the same model on Python source of this machine, on the same rows. Two groups
have one learning rate each: the stable one, and one of HOT times it, at which the plain
run is not stable. It stays at its peak after the warm-up, and the averaged weights are
evaluated, so that a run may take more steps and its first ones stay the same. Each
finished run is a line of `<directory>/runs.jsonl`, and is not run again; the picture is
`<directory>/curves.png`.

python examples/benchmarks/efficiency_quality.py [--methods=plain,window]
    [--seeds=0,1,2] [--text=DIR] [--directory=DIR] [setting=value ...]
"""

import dataclasses
import functools
import pathlib

import call_timing
import curriculum_quality
import jax
import matplotlib.pyplot as plt
import numpy as np
import package_text
import quality_records
import timing
from quality_training import SMALL_GPT, Method, make_run, train_missing

import zjax
from zjax.data.metric_index import index_path
from zjax.data.store import digest_tokenizer
from zjax.run.compiler import use_program_cache
from zjax.schedule.training import TrainingSchedule

DIRECTORY = pathlib.Path("runs/efficiency_quality")
TEXT = pathlib.Path("runs/package_text")
NUM_POINTS = 30
HOT = 7
RATIO = 1.2
"""Loss over the least loss before, above which a step counts as unstable."""
SETTINGS = {
    "num_steps": 600,
    "global_batch_size": 64,
    "zero": {"stage": 0},
    "data": {"source": "tokens"},
    "model": SMALL_GPT | {"max_length": 2048},
    "optimizer": {
        "schedule": {"kind": "constant", "num_warmup_steps": 100},
        "peak_learning_rate": 0.001,
        "ema_decay": 0.99,
    },
    "evaluation": {"num_batches": 8},
}
SHARE = 0.6
"""Of the plain run's steps until the context is whole and all samples are drawn."""
KEPT_SHARE = 0.7
"""Of them until middle layers run on all tokens; first on half of the longest rows."""
NUM_LENGTHS = 5
"""Lengths of truncated sequences, each half of the next."""
MORE = 1.2
"""Steps of runs whose first steps cost less, over those of the plain run."""
KINDS = {"plain": None, "truncate": "truncate", "window": "window"}
METHODS = (*KINDS, "composed", *(f"hot_{kind}" for kind in KINDS))


def make_config(method, directory, *more):
    config = zjax.load_config(SETTINGS, *more)
    return zjax.load_config(config, make_changes(method, directory, config))


def make_changes(method, directory, plain):
    """Settings by which a method differs from the plain run.

    Its schedules end at a share of the steps of that run.
    """
    num_steps, length, changes = plain.num_steps, plain.data.length, {}
    end = round(SHARE * num_steps)
    if method.startswith("hot_"):
        rate = HOT * plain.optimizer.peak_learning_rate
        changes["optimizer.peak_learning_rate"] = rate
    elif method != "plain":
        changes["num_steps"] = round(MORE * num_steps)
    kind = KINDS.get(method.removeprefix("hot_"), "truncate")
    if kind:
        changes["sequence_warmup"] = {"kind": kind, "pacing": {"num_steps": end}}
    if kind == "truncate":
        changes["sequence_warmup"]["pacing"] = doubling(length, end)
    if method == "composed":
        pacing = {"kind": "root", "start": 5, "num_steps": end}
        metric = {"index": str(index_path(directory, "voc")), "pacing": pacing}
        changes["curriculum.metrics"] = [metric]
        values = [length // 4, length // 2, length]
        kept = {"kind": "discrete", "values": values}
        kept["last_steps"] = [end, round(KEPT_SHARE * num_steps)]
        changes["random_ltd"] = {"kind": "layerwise", "pacing": kept}
    return changes


def doubling(length, end):
    """A pacing of lengths, the short ones for equally many steps each."""
    shorter = NUM_LENGTHS - 1
    values = [length >> (shorter - i) for i in range(NUM_LENGTHS)]
    last_steps = [end * (i + 1) // shorter for i in range(shorter)]
    return {"kind": "discrete", "values": values, "last_steps": last_steps}


def make_method(config):
    """A method whose lengths are all compiled; a window needs no more than one."""
    method = Method(make_run(config), NUM_POINTS, part="ema")
    run = method.run
    changes = TrainingSchedule(config).changes(1)
    for first in (1, *(steps.start for steps in changes)):
        state = method.start(0)
        done = jax.device_put(np.int32(first - 1), state.step.sharding)
        state = dataclasses.replace(state, step=done)
        with zjax.make_loader(
            run.config, run.batch_placement, start_step=first - 1, num_batches=1
        ) as batches:
            run.step(state, next(batches))
    return method


def describe(method, losses):
    programs = method.run.step.programs["train"]._cache_size()
    return {"unstable": count_unstable(losses), "programs": programs}


def count_unstable(losses):
    """Steps whose loss is more than RATIO times the least before, or not a number."""
    least = np.minimum.accumulate(np.nan_to_num(losses, nan=np.inf))[:-1]
    return int((~(losses[1:] <= RATIO * least)).sum())


def compare(records, seeds):
    """Results by name, of the runs that there are."""
    of = functools.partial(records.read_all, seeds=seeds)
    found = {}
    if plain := of("plain"):
        times = {name: speedups(runs, plain) for name in METHODS if (runs := of(name))}
        found["speedups"] = {
            name: times[name] for name in ("truncate", "window") if name in times
        }
        best = max(found["speedups"].values(), key=np.median, default=None)
        if best:
            found["time_over_plain"] = timing.spread(best)
        if "composed" in times:
            found["composed_over_plain"] = timing.spread(times["composed"])
    if hot := of("hot_plain"):
        warm = [runs for kind in ("truncate", "window") if (runs := of(f"hot_{kind}"))]
        if warm:
            least = min(([run["unstable"] for run in runs] for runs in warm), key=sum)
            pairs = zip(hot, least, strict=True)
            ratios = [run["unstable"] / max(1, other) for run, other in pairs]
            found["unstable_over_warm"] = timing.spread(ratios)
    if window := of("window"):
        programs = [run["programs"] for run in window]
        found["window_programs"] = timing.spread(programs)
    return found


def speedups(runs, plain):
    """Seconds of plain runs to their final loss over those of others; 0 if never."""
    shares = quality_records.shares(runs, plain, by="seconds")
    return [1 / share if share else 0.0 for share in shares]


def plot(records, path):
    """Draws mean losses against steps and against seconds."""
    figure, panels = plt.subplots(
        1, 2, figsize=(11, 4.5), sharey=True, layout="constrained"
    )
    for method in METHODS:
        runs = [run for (name, _), run in sorted(records.items()) if name == method]
        if not runs:
            continue
        curves = np.array([run["losses"] for run in runs])
        quality_records.draw(panels[0], method, curves)
        seconds = np.mean([run["seconds"] for run in runs], axis=0)
        panels[1].plot(seconds, curves[..., 1].mean(axis=0), label=method)
    panels[0].set(xlabel="step", ylabel="loss on held-out text (nats per token)")
    panels[1].set_xlabel("seconds of training")
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main():
    given = quality_records.parse(__doc__, METHODS, DIRECTORY, TEXT)
    use_program_cache()
    package_text.prepare_text(given.text)
    settings = [f"data.path={given.text}", *given.settings]
    has_index = index_path(given.directory, "voc").exists()
    if "composed" in given.methods and not has_index:
        config = make_config("plain", given.directory, *settings)
        curriculum_quality.measure_metrics(config, given.directory)
    device = jax.devices()[0].device_kind
    config = zjax.load_config(SETTINGS, *settings)
    common = [device, digest_tokenizer(str(given.text)), SETTINGS, *given.settings]
    setups = {
        method: [make_changes(method, pathlib.Path(), config), *common]
        for method in METHODS
    }
    records = quality_records.Records(given.directory / "runs.jsonl", setups)
    train_missing(
        given.methods,
        given.seeds,
        records,
        lambda name: make_method(make_config(name, given.directory, *settings)),
        describe,
    )
    plot(records.read(), given.directory / "curves.png")
    found = compare(records, given.seeds)
    call_timing.print_result(found, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
