"""Contestants that need no accelerator: one line of Python each."""

import json
import pickle

from contests import Case, Contest, Contestant, Row
from contests.turns import Machine

MACHINE = Machine(identity="a", device="toy", num_devices=2)


def speed(median):
    return {"median": median, "min": median - 1, "max": median + 1, "n": 5}


def contestant(
    name, *, kind="zjax", code=None, timeout=300, environment=None, **numbers
):
    line = f"RESULT {json.dumps(numbers)}"
    code = code or f"print('noise'); print({line!r})"
    command = ("{python}", "-c", code)
    return Contestant(name, command, kind, environment or {}, timeout)


def runner(name, median, peak=8, kind="zjax"):
    numbers = {"tokens_per_second_per_device": speed(median), "peak_bytes": peak}
    return contestant(name, kind=kind, versions={name[:1]: "1"}, loss=2.5, **numbers)


def speed_row(id, ours, peer, **settings):
    metric, unit = "tokens_per_second_per_device", "tokens/s/device"
    return Row(id, f"claim {id}", (Case(ours, peer, metric, unit, **settings),))


def write_contest(path, contestants, rows):
    """A contest file whose `get_contest` gives these."""
    contest = Contest("a toy", tuple(contestants), tuple(rows))
    held = pickle.dumps(contest).hex()
    give = f"return pickle.loads(bytes.fromhex('{held}'))"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"import pickle\ndef get_contest(): {give}\n")
