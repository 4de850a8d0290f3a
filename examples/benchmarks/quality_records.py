"""Runs of methods and seeds: their arguments, records, ratios and picture."""

import argparse
import dataclasses
import json
import pathlib

import matplotlib.pyplot as plt
import numpy as np
import timing


@dataclasses.dataclass(frozen=True)
class Records:
    """Runs of known setups.

    Args:
        path: A file of JSON lines, also of other setups.
        setups: By method all that must be equal for runs to be the same.
    """

    path: pathlib.Path
    setups: dict

    def read(self):
        """Records by method and seed; `losses` holds pairs of a step and a loss."""
        lines = self.path.read_text().splitlines() if self.path.exists() else ()
        setups = json.loads(json.dumps(self.setups))  # as written: tuples are lists
        return {
            (record["method"], record["seed"]): record
            for record in map(json.loads, lines)
            if record["setup"] == setups.get(record["method"])
        }

    def read_all(self, method, seeds):
        """Records of a method by seed; None unless all are there."""
        known = self.read()
        runs = [known.get((method, seed)) for seed in seeds]
        return None if None in runs else runs

    def write(self, method, seed, *, losses=None, **more):
        """Adds a run; `losses` by step, if there are any."""
        record = {"method": method, "seed": seed, "losses": [*(losses or {}).items()]}
        record |= more | {"setup": self.setups[method]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def parse(description, methods, directory, text, words=None):
    """Arguments of a program that trains some methods with some seeds."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--methods", default=",".join(methods))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--directory", type=pathlib.Path, default=directory)
    parser.add_argument("--text", type=pathlib.Path, default=text)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args(words)
    given.methods = given.methods.split(",")
    given.seeds = [int(seed) for seed in given.seeds.split(",")]
    if unknown := set(given.methods) - set(methods):
        parser.error(f"methods={min(unknown)} is unknown; use {', '.join(methods)}")
    return given


def compare(records, twins, seeds):
    """Final losses of methods over those of their twins, seed by seed."""
    final = {key: record["losses"][-1][1] for key, record in records.read().items()}
    found = {}
    for method, twin in twins.items():
        pairs = [((method, seed), (twin, seed)) for seed in seeds]
        if all(key in final for pair in pairs for key in pair):
            ratios = [final[own] / final[other] for own, other in pairs]
            found[method] = timing.spread(ratios)
    return found


def shares(runs, others, *, by):
    """What runs need to the final losses of others, over what those need, by seed.

    Both reach a loss for the first time: the others may have been there before their
    end. None where one never is, as where the final loss is not a number.

    Args:
        runs: Records.
        others: Records of equal seeds.
        by: `tokens` or `seconds`.
    """
    found = []
    for run, other in zip(runs, others, strict=True):
        final = other["losses"][-1][1]
        own, needed = (reach(final, curve(each, by)) for each in (run, other))
        found.append(None if own is None or needed is None else own / needed)
    return found


def curve(run, by):
    """Losses of a record by tokens or by seconds."""
    losses = (loss for _, loss in run["losses"])
    return dict(zip(run[by], losses, strict=True))


def reach(loss, losses):
    """Where losses first reach one, interpolated; None if they never do.

    A loss that is not a number is never reached, and reaches nothing.
    """
    before = None
    for place, value in losses.items():
        if value <= loss:
            if before is None or not before[1] > value:
                return place
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (place - before[0])
        before = place, value
    return None


def plot(records, twins, path):
    """Draws a panel for each twin: mean losses of its methods, and their range.

    Args:
        records: Records by method and seed.
        twins: Twin by method.
        path: The picture.
    """
    curves = {}
    for method, seed in sorted(records):
        curves.setdefault(method, []).append(records[method, seed]["losses"])
    names = [name for name in dict.fromkeys(twins.values()) if name in curves]
    if not names:
        return
    figure, panels = plt.subplots(
        1,
        len(names),
        figsize=(1 + 4 * len(names), 4.5),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, twin in zip(panels[0], names, strict=True):
        methods = [name for name, other in twins.items() if other == twin]
        for name in [twin, *(name for name in methods if name in curves)]:
            style = {"color": "black"} if name == twin else {}
            draw(panel, name, np.array(curves[name]), **style)
        panel.set_xlabel("step")
        panel.legend(frameon=False)
    panels[0, 0].set_ylabel("loss on held-out text (nats per token)")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw(panel, name, curves, **style):
    """Draws pairs of steps and losses [seeds, points, 2]."""
    steps, losses = curves[0, :, 0], curves[..., 1]
    label = f"{name} {losses[:, -1].mean():.3f}"
    (line,) = panel.plot(steps, losses.mean(axis=0), label=label, **style)
    low, high = losses.min(axis=0), losses.max(axis=0)
    panel.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
