"""Console of a run: a progress bar on a terminal, plain lines elsewhere."""

import datetime
import math
import pathlib
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from zjax.observe.metrics import Value, scalars

_SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "evaluated_rows": "{:,.0f} rows",
    "grad_norm": "grad {:.2f}",
    "learning_rate": "lr {:.2e}",
    "loss_scale": "scale {:.0f}",
    "skipped_steps": "skipped {:.0f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "mfu_full_attention": "({:.1%} full)",
    "step_seconds": "{:.3g} s/step",
}
"""Formats of familiar values, in the order of a line."""
_ON_BAR = ("loss", "tokens_per_second", "mfu", "mfu_full_attention", "step_seconds")
_LINES = 20
"""Lines of training that a run leaves above the bar of a terminal."""
_HIDDEN = ("consumed_tokens", "weight", "loss_scale_spent")

RESUME = "run the same command again to resume"


def describe_end(
    step: int,
    num_steps: int,
    num_skipped: int,
    checkpoint: pathlib.Path | None,
    pictures: Sequence[pathlib.Path] = (),
    load: str = "",
    reason: str = "",
    resume: str = RESUME,
) -> str:
    """Describes in a few lines how a run ended and where to find results.

    A run that ended before the first step has no checkpoint.

    Example:
        >>> print(describe_end(8, 8, 0, pathlib.Path("runs/a/checkpoints/8")))
        done at step 8
        checkpoint: runs/a/checkpoints/8
    """
    is_done = step >= num_steps
    note = f", {num_skipped} of them skipped" if num_skipped else ""
    note += f": {reason}" if reason and not is_done else ""
    lines = [f"{'done' if is_done else 'stopped'} at step {step}{note}"]
    if load:
        lines.append(load)
    lines.append(f"checkpoint: {checkpoint or 'none, as no step was taken'}")
    lines += [f"picture: {picture}" for picture in pictures]
    if not is_done:
        lines.append(resume)
    return "\n".join(lines)


class Progress:
    """Console sink.

    On a terminal a bar stays at the bottom; evaluations, a line for each twentieth of
    the run and other output appear above the bar. Elsewhere every write prints a line.
    """

    def __init__(self, num_steps: int, *, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._console = Console() if console is None else console
        self._values: dict[str, int | float] = {}
        self._live: Live | None = None
        self._num_lines = -1  # the first step leaves a line
        self._bar = Bar(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._task = self._bar.add_task("", start=False, total=num_steps, left="")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Shows the numbers of a step; `step_seconds` gives the time left."""
        values = scalars(values)
        # The bar keeps values that later writes do not repeat.
        self._values |= values
        if not self._console.is_terminal:
            self._print(step, values)
            return
        if self._live is None:
            self._bar.start_task(self._task)
            self._live = Live(self._bar, console=self._console)
            self._live.start()
        num_lines = step * _LINES // self._num_steps
        if "eval_loss" in values or num_lines > self._num_lines:
            self._print(step, values)
        # An evaluation does not replace the line of training.
        if "loss" in values:
            self._num_lines = num_lines
        self._bar.update(
            self._task, completed=step, left=self._time_left(step, self._values)
        )
        shown = {name: self._values[name] for name in _ON_BAR if name in self._values}
        self._live.update(Group(self._bar, Text("  ".join(describe_values(shown)))))

    def close(self) -> None:
        """Stops the bar and releases the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, step: int, values: Mapping[str, int | float]) -> None:
        """Prints the values of a step on one line."""
        width = len(str(self._num_steps))
        parts = [f"step {step:>{width}}/{self._num_steps}", *describe_values(values)]
        parts.append(self._time_left(step, values))
        line = "  ".join(filter(None, parts))
        # Brackets in names are no markup of rich; files get lines of any width.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _time_left(self, step: int, values: Mapping[str, int | float]) -> str:
        """Time to the last step as a text; empty if unknown."""
        num_left = self._num_steps - step
        if not num_left or "step_seconds" not in values:
            return ""
        return f"ETA {describe_seconds(num_left * values['step_seconds'])}"


def describe_values(values: Mapping[str, int | float]) -> list[str]:
    """Formats values, familiar values first; a few internal values are left out.

    Example:
        >>> describe_values({"step_seconds": 0.25, "loss": 3.14159, "accuracy": 0.5})
        ['loss 3.1416', '0.25 s/step', 'accuracy 0.5']
    """
    known = [
        text.format(values[name]) for name, text in _SHOWN.items() if name in values
    ]
    others = [name for name in values if name not in _SHOWN and name not in _HIDDEN]
    return known + [f"{name} {values[name]:.4g}" for name in others]


def describe_seconds(seconds: int | float) -> str:
    """Formats a duration as `h:mm:ss`, rounded up, after the days if there are any.

    Example:
        >>> describe_seconds(3725.2), describe_seconds(90_000)
        ('1:02:06', '1 day, 1:00:00')
    """
    return str(datetime.timedelta(seconds=math.ceil(seconds)))
