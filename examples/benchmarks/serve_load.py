"""Draws tokens per second and the time to a first token over the number of clients.

python examples/benchmarks/serve_load.py [--shape=8b] [--output=FOLDER]

Runs `serve_ours.py`, with its flags, for more and more clients; writes the picture
`serve_load.png` and its points, `points/serve_load.json`.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from zjax.observe.plot import BLUE, make_figure, save_figure, style_axes

CLIENTS = 1, 8, 32, 128
FOLDER = pathlib.Path(__file__).parent
SIDES = (
    ("tokens/s", 1.0, "tokens/s, all clients", "{x:,.10g}"),
    ("first_seconds", 1e3, "time to the first token, ms (median)", "{x:,.10g}"),
)
"""Metric, factor, label and form of the numbers of each side of the picture."""


def measure(words):
    """Runs the server, and returns what it prints."""
    clients = ",".join(map(str, CLIENTS))
    command = [sys.executable, str(FOLDER / "serve_ours.py"), f"--clients={clients}"]
    command += ["--num_warm_ups=1", "--num_rounds=3", *words]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.rpartition("RESULT ")[2])


def draw(result, path):
    """Draws both metrics over the number of clients."""
    figure = make_figure(9, 3.6)
    figure.suptitle(f"A server and its clients, {result['device']}", fontsize=12)
    for axes, (metric, factor, label, form) in zip(
        figure.subplots(1, 2), SIDES, strict=True
    ):
        spreads = [result[f"{number} clients {metric}"] for number in CLIENTS]
        medians, lows, highs = (
            [factor * spread[key] for spread in spreads]
            for key in ("median", "min", "max")
        )
        axes.plot(CLIENTS, medians, marker="o", color=BLUE)
        axes.fill_between(CLIENTS, lows, highs, color=BLUE, alpha=0.2, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(CLIENTS, [str(number) for number in CLIENTS])
        axes.set_xlabel("clients at once")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(form)
        style_axes(axes)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, default=FOLDER / "results")
    given, words = parser.parse_known_args()
    result = measure(words)
    result["date"] = datetime.date.today().isoformat()
    given.output.mkdir(parents=True, exist_ok=True)
    draw(result, given.output / "serve_load.png")
    points = given.output / "points" / "serve_load.json"
    points.parent.mkdir(exist_ok=True)
    points.write_text(json.dumps(result, indent=2) + "\n")
    table = Table("clients", *(label for _, _, label, _ in SIDES))
    for number in CLIENTS:
        cells = [
            f"{factor * result[f'{number} clients {metric}']['median']:,.0f}"
            for metric, factor, *_ in SIDES
        ]
        table.add_row(str(number), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
