"""What is printed, on a terminal and off it."""

import io
import re

from rich.console import Console

from zjax.observe import Progress

VALUES = {
    "learning_rate": 3e-4,
    "loss": 3.25,
    "tokens_per_second": 41_234.5,
    "mfu": 0.5234,
    "mfu_full_attention": 0.551,
    "step_seconds": 0.25,
    "grad_norm": 0.5,
    "consumed_tokens": 10_000,
    "accuracy": 0.75,
}


def show(rows, *, terminal, num_steps=1000):
    """What a console shows when the rows are written, then closed."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    with Progress(num_steps, console=console) as progress:
        for step, values in rows:
            progress.write(step, values)
    return out.getvalue()


def test_every_write_is_one_line_off_a_terminal():
    text = show([(40, VALUES), (1000, {"eval_loss": 3.5})], terminal=False)
    assert text == (
        "step   40/1000  loss 3.2500  grad 0.50  lr 3.00e-04  41,234 tokens/s  "
        "MFU 52.3%  (55.1% full)  0.25 s/step  accuracy 0.75  ETA 0:04:00\n"
        "step 1000/1000  eval loss 3.5000\n"
    )


def test_no_mfu_is_shown_where_the_peak_is_not_known():
    values = {"loss": 3.25, "step_seconds": 0.25}
    text = show([(1000, values)], terminal=False)
    assert text == "step 1000/1000  loss 3.2500  0.25 s/step\n"


def test_a_bar_shows_count_speed_and_time_left_on_80_columns():
    text = show([(40, VALUES)], terminal=True)
    assert "40/1000 0:00:00 ETA 0:04:00" in text
    speed = "loss 3.2500  41,234 tokens/s  MFU 52.3%  (55.1% full)  0.25 s/step"
    assert speed in text


def test_the_bar_keeps_values_that_a_write_does_not_repeat():
    text = show([(40, VALUES), (50, {"eval_loss": 3.5})], terminal=True)
    assert "step   50/1000  eval loss 3.5000\n" in text
    assert "50/1000 0:00:00 ETA 0:03:58" in text


def test_a_terminal_keeps_a_line_for_each_twentieth_of_a_run():
    """Fails if the scrollback of a run has no training loss."""
    rows = [(step, {"loss": step / 10}) for step in range(10, 1001, 10)]
    text = show(rows, terminal=True)
    assert len(re.findall(r"step +\d+/1000", text)) == 21
    assert "step  100/1000  loss 10.0000" in text
    assert "step  110/1000" not in text


def test_the_cursor_comes_back_when_a_run_is_interrupted():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    try:
        with Progress(10, console=console) as progress:
            progress.write(1, {"loss": 2.5})
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert out.getvalue().endswith("\x1b[?25h")
