"""What crosses the links of a run: those inside nodes, and those between them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from zjax.observe.collectives import (
    Collective,
    bytes_inside_node,
    bytes_leaving_node,
)
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.mesh import REPLICA

TITLE = "what one node (replica) sends in one run of each program"
ON_AVERAGE = "a step on average"


class LinkBytes(NamedTuple):
    """Bytes that one node sends.

    Args:
        inside: From device to device of the node.
        between: To other nodes.
    """

    inside: float
    between: float


def link_bytes(
    collectives: Sequence[Collective], mesh: Mesh | AbstractMesh
) -> LinkBytes:
    """What one node sends in one run of a program.

    Args:
        collectives: Collectives of the program, from `list_collectives`.
        mesh: The mesh of the program; `replica` joins the nodes.
    """
    return LinkBytes(
        bytes_inside_node(collectives, mesh, REPLICA),
        bytes_leaving_node(collectives, mesh, REPLICA),
    )


def describe_links(
    programs: Mapping[str, LinkBytes], times: Mapping[str, int], num_steps: int
) -> str:
    """Bytes by link of each program of a run, and of its mean step.

    Args:
        programs: What a node sends in one run of each program.
        times: How often each runs.
        num_steps: Steps of the run.

    Returns:
        A table of at most 80 columns.

    Example:
        >>> sent = {"local": LinkBytes(8e6, 0.0), "exchange": LinkBytes(0.0, 2e6)}
        >>> text = describe_links(sent, {"local": 100, "exchange": 10}, 100)
        >>> print(text.splitlines()[-1])
        a step on average                          8.00 MB       200.00 kB
    """
    rows = [
        (name, f"{times[name]:,}", *map(format_bytes, programs[name]))
        for name in programs
    ]
    totals = (
        sum(sent[i] * times[name] for name, sent in programs.items()) / num_steps
        for i in range(2)
    )
    rows.append((ON_AVERAGE, "", *map(format_bytes, totals)))
    columns = ("program", "times in a run", "inside a node", "between nodes")
    return f"{TITLE}\n{render_table(columns, rows, right=(1, 2, 3))}"
