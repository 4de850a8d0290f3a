"""`zjax check`: reads every step of a run and compares it with its checksums."""

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence

from zjax.checkpoint import failures, sums
from zjax.checkpoint import steps as directories
from zjax.checkpoint.sums import SUMS_FILE
from zjax.config.paths import local_path
from zjax.sharding.describe import format_bytes, render_table

INTACT = "intact"
UNVERIFIABLE = "unknown (no checksums)"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The state of one step.

    Args:
        path: Directory of the step.
        num_files: Number of files.
        num_bytes: Bytes of all files.
        problem: `INTACT`, `UNVERIFIABLE`, or the first problem and a count of others.
        is_offered: Whether a run would try to resume from it.
    """

    path: pathlib.Path
    num_files: int
    num_bytes: int
    problem: str
    is_offered: bool = True


def inspect_steps(directory: str) -> list[Verdict]:
    """Reads all files of all steps.

    Steps share the files of disk arrays that did not change; such a file is read once,
    and its damage counts for each of them.

    Args:
        directory: Directory of a run, or its `checkpoints`.

    Returns:
        One verdict per step, oldest first.

    Raises:
        CheckpointError: There is no step.
    """
    top = pathlib.Path(local_path("directory", directory)).absolute()
    inside = top / "checkpoints"
    place = inside if inside.is_dir() else top
    if place.exists() and not place.is_dir():
        raise failures.not_a_directory(place)
    linked_sums = sums.LinkedSums()
    verdicts = [
        _inspect(place / str(step), linked_sums)
        for step in directories.named_steps(place)
    ]
    if not verdicts:
        raise failures.empty(place)
    return verdicts


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """Exit status of `zjax check`.

    Returns:
        0 if every step is intact, 1 if one is damaged or incomplete, else 3: a step
        has no checksums.

    Example:
        >>> path = pathlib.Path("runs/a/checkpoints/8")
        >>> exit_status([Verdict(path, 3, 10, UNVERIFIABLE)])
        3
    """
    problems = {verdict.problem for verdict in verdicts}
    if problems <= {INTACT}:
        return 0
    return 3 if problems <= {INTACT, UNVERIFIABLE} else 1


def describe_verdicts(verdicts: Sequence[Verdict]) -> str:
    """A table of the verdicts (one or more), and the command to run next."""
    rows = [
        (v.path.name, f"{v.num_files:,}", format_bytes(v.num_bytes), v.problem)
        for v in verdicts
    ]
    table = render_table(("step", "files", "bytes", "state"), rows, right=(0, 1, 2))
    return f"{verdicts[0].path.parent}\n{table}\n{_advice(verdicts)}"


def _advice(verdicts: Sequence[Verdict]) -> str:
    usable = [v for v in verdicts if v.problem in (INTACT, UNVERIFIABLE)]
    if not usable:
        return "no step can be restored: start in another directory"
    newest = usable[-1]
    after = verdicts[verdicts.index(newest) + 1 :]
    in_the_way = [v for v in after if v.is_offered]
    if not in_the_way:
        return f"a run resumes from step {newest.path.name}"
    words = ["rm", "-r", *(str(v.path) for v in in_the_way)]
    return f"to resume from step {newest.path.name}:\n{shlex.join(words)}"


def _inspect(path: pathlib.Path, linked_sums: sums.LinkedSums) -> Verdict:
    names = sums.list_files(path)
    num_bytes = sum((path / name).lstat().st_size for name in names)
    missing = directories.find_missing(path)
    if missing:
        return Verdict(path, len(names), num_bytes, f"not complete: {missing}", False)
    if not directories.has_sums(path):
        return Verdict(path, len(names), num_bytes, UNVERIFIABLE)
    known = sums.read_sums(path / SUMS_FILE)
    damage = sums.find_damage(
        path,
        known,
        names=list(known),
        whole_chunks=True,
        linked_sums=linked_sums,
    )
    problem = INTACT
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        problem = f"damaged: {damage[0][1]}{more}"
    return Verdict(path, len(names), num_bytes, problem)
