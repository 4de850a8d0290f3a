"""A table and a picture of the runs of a directory."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.pyplot as plt
import methods
import records
from rich.console import Console
from rich.table import Table

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps/s": ("mean_steps_per_second", "{:.2f}".format),
    "MB sent/step": ("sent_bytes_per_step", lambda x: f"{x / 1e6:.2f}"),
    "link used": ("link_share", "{:.0%}".format),
    "communication": ("communication_share", "{:.0%}".format),
    "final loss": ("final_loss", "{:.3f}".format),
    "s to loss": ("seconds_to_loss", "{:.1f}".format),
}


def summaries(
    runs: Mapping[str, records.Records], reference: str
) -> dict[str, dict[str, Any]]:
    """The numbers of every run, by method."""
    return {
        name: records.summarize(run, runs[methods.ALONE], runs[reference])
        for name, run in runs.items()
        if name != methods.ALONE
    }


def show(found: Mapping[str, Mapping[str, Any]], speeds: Mapping[str, float]) -> None:
    """Prints the speed of the plain link, and a row per method.

    Args:
        found: Numbers by method.
        speeds: Bytes per second by what was measured.
    """
    console = Console(width=100)
    link = [f"{name} {speed / 1e6:.1f} MB/s" for name, speed in speeds.items()]
    console.print("one plain connection: " + ", ".join(link))
    table = Table("method", *COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, numbers in found.items():
        cells = [
            "not reached" if numbers[key] is None else form(numbers[key])
            for key, form in COLUMNS.values()
        ]
        table.add_row(name, *cells)
    console.print(table)


def plot(runs: Mapping[str, records.Records], path: pathlib.Path) -> None:
    """Draws loss on held-out text against the wall time of the steps."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, run in runs.items():
        if run.evaluations:
            seconds = [x["seconds"] for x in run.evaluations]
            losses = [x["eval_loss"] for x in run.evaluations]
            axes.plot(seconds, losses, label=name, marker=".")
    setup = next(iter(runs.values())).setup
    axes.set_title(
        f"{setup['num_processes']} processes on {setup['num_nodes']} nodes, "
        f"links of {setup['megabits']:g} Mbit/s"
    )
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss on held-out text (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    print(f"picture: {path}")
