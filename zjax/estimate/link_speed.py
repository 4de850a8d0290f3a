"""Predicts the step of a run over slow links by each method of communication."""

import dataclasses
import math
import re
import textwrap
from typing import Any

import jax

from zjax.config.check import check_config
from zjax.errors import ConfigError, PlanError, Problem
from zjax.estimate.methods import baseline_of, methods_of, sent_per_step
from zjax.estimate.traced import run_flops
from zjax.models import flops
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings import axes, schema
from zjax.settings.batch import resolve_batch
from zjax.sharding import mesh as meshes
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.plan import Plan, make_plan
from zjax.typing import Model

ASSUMED_MFU = 0.4
"""Fraction of peak FLOP/s that a step is assumed to reach without communication."""
ASSUMED_DEVICE = "NVIDIA H100"
"""Device whose peak FLOP/s is assumed if the peak of the devices is unknown."""
WORTH_IT = 0.95
"""Largest fraction of the baseline's step time at which a method pays."""
NOTE = (
    "sent: bytes from one node (replica) to others in a step, on average over the run\n"
    "(a round of DiLoCo takes {} steps); no communication is hidden behind\n"
    "computation, and latency is not counted"
)
_SPEED = re.compile(r"(\d+(?:\.\d+)?|\.\d+)([kmgt])(b|B)ps", re.ASCII)
_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_speed(text: str) -> float:
    """Parses the speed of a link into bytes per second.

    Args:
        text: Number above 0 with a prefix k, m, g or t in either case, then `bps` for
            bits or `Bps` for bytes.

    Raises:
        ConfigError: The text is not a speed.

    Example:
        >>> parse_speed("100mbps"), parse_speed("1Gbps"), parse_speed("25GBps")
        (12500000.0, 125000000.0, 25000000000.0)
    """
    # Only the case of `b` and `B` matters: bits or bytes.
    found = _SPEED.fullmatch(text[:-3].lower() + text[-3:])
    speed = 0.0
    if found:
        number, prefix, unit = found.groups()
        speed = float(number) * _PREFIXES[prefix] / (8 if unit == "b" else 1)
    if not speed:
        problem = "is not a speed above 0"
        remedy = "use bits, such as 100mbps or 1gbps, or bytes, such as 25GBps"
        raise ConfigError(Problem("link", text, problem, remedy))
    return speed


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted step of a run by one method of communication.

    Args:
        method: Name of the method.
        sent: Bytes that a node sends per step.
        seconds: Seconds of the step, computation included.
        link_seconds: Seconds of the step spent on the link.
        obstacle: Reason why the run cannot use the method; all numbers are then 0.
    """

    method: str
    sent: float = 0.0
    seconds: float = 0.0
    link_seconds: float = 0.0
    obstacle: str = ""


def check_link(config: schema.Config, num_devices: int, link: str) -> tuple[float, int]:
    """Parses a link's speed into bytes per second, and counts the nodes it joins."""
    speed = parse_speed(link)
    nodes = axes.axis_sizes(config, num_devices)[meshes.REPLICA]
    if nodes == 1:
        problem = "joins no nodes with mesh.replica=1"
        remedy = "leave it out, or set mesh.replica to the number of nodes"
        raise ConfigError(Problem("link", link, problem, remedy))
    return speed, nodes


def report_link(config: schema.Config, num_devices: int, link: str) -> str:
    """Predicts a step by each method over a link, and marks methods that pay.

    Args:
        config: Checked settings of a built-in model.
        num_devices: Devices of the run; replicas are the nodes.
        link: Speed of each node's link, such as `1gbps`.

    Returns:
        A table of at most 80 columns.

    Raises:
        ConfigError: The link is not a speed, there is one node, or all methods are
            refused.
    """
    speed, nodes = check_link(config, num_devices, link)
    model = make_model(config)
    compute, formula = _compute_seconds(config, model, num_devices)
    methods = methods_of(config)
    predictions = [
        _predict(name, each, model, num_devices, compute, speed)
        for name, each in methods.items()
    ]
    if all(each.obstacle for each in predictions):
        problem = "compares no methods: all are refused"
        remedy = "leave it out, or change what the first is refused for: "
        remedy += predictions[0].obstacle
        raise ConfigError(Problem("link", link, problem, remedy))
    table = describe_predictions(predictions, baseline_of(config))
    length = methods["DiLoCo"].communication.rounds.num_steps
    title = (
        f"a step on {nodes} nodes joined by links of {link}, {format_bytes(speed)}/s\n"
        f"computing: {formula}\n"
    )
    return f"{title}{table}\n{NOTE.format(length)}"


def describe_predictions(predictions: list[Prediction], baseline: str) -> str:
    """Formats predictions as a table, with refusals below.

    Methods are compared with `baseline`, or the first possible method if it is refused.
    """
    found = [each for each in predictions if not each.obstacle]
    least = min(each.seconds for each in found)
    base = next((each for each in found if each.method == baseline), found[0])
    rows, refused = [], []
    for each in predictions:
        if each.obstacle:
            rows.append((each.method, *[""] * 4, "refused"))
            refused += textwrap.wrap(f"{each.method}: {each.obstacle}", 80)
            continue
        numbers = (
            format_bytes(each.sent),
            _seconds(each.link_seconds),
            _seconds(each.seconds),
            f"{base.seconds / each.seconds:.2f}",
        )
        rows.append((each.method, *numbers, _verdict(each, least, base)))
    columns = ("method", "sent", "link", "step", "speed-up", "")
    return "\n".join([render_table(columns, rows, right=range(1, 5)), *refused])


def _seconds(number: float) -> str:
    return f"{number:.2f} s" if number >= 1 else f"{1e3 * number:.1f} ms"


def _verdict(each: Prediction, least: float, base: Prediction) -> str:
    """Says whether a method is the fastest, the baseline, pays or is not worth it."""
    if each.seconds == least:
        return "fastest"
    if each is base:
        return "baseline"
    return "pays" if each.seconds <= WORTH_IT * base.seconds else "not worth it"


def _predict(
    method: str,
    config: schema.Config,
    model: Model,
    num_devices: int,
    compute: float,
    speed: float,
) -> Prediction:
    """Predicts a step by one method, or finds the obstacle."""
    try:
        check_config(config, num_devices)
        sent = sent_per_step(_plan(config, model, num_devices), config)
    except (ConfigError, PlanError) as error:
        return Prediction(method, obstacle=str(error.problems[0]))
    seconds = sent / speed
    return Prediction(method, sent, compute + seconds, seconds)


def _plan(config: schema.Config, model: Model, num_devices: int) -> Plan:
    """Plans a run on an abstract mesh, for any number of devices."""
    mesh = meshes.abstract_mesh(config.mesh, num_devices)
    tx: Any = make_optimizer(config, model)
    return make_plan(config, mesh, model, tx)


def _compute_seconds(
    config: schema.Config, model: Model, num_devices: int
) -> tuple[float, str]:
    """Seconds of a step's FLOPs, and the formula with all numbers."""
    sizes = axes.axis_sizes(config, num_devices)
    shares = math.prod(sizes[axis] for axis in axes.BATCH_AXES)
    tokens = resolve_batch(config, shares).global_batch_size * config.data.length
    counted = run_flops(model, model.inputs, config)
    work = counted.seen / config.data.length
    peak, source = _peak_flops(config)
    seconds = tokens * work / (num_devices * peak * ASSUMED_MFU)
    told = _seconds(seconds)
    formula = (
        f"{tokens:,} tokens x {work / 1e6:,.1f} MFLOP, by {num_devices} devices at\n"
        f"{ASSUMED_MFU:.0%} of {peak / 1e12:,.1f} TFLOP/s ({source}): {told}"
    )
    return seconds, formula


def _peak_flops(config: schema.Config) -> tuple[float, str]:
    """Peak FLOP/s of a device, and the source of the number."""
    if config.observe.peak_tflops:
        return config.observe.peak_tflops * 1e12, "observe.peak_tflops"
    dtype = config.precision.compute_dtype
    kind = jax.devices()[0].device_kind
    if peak := flops.peak_flops(kind, dtype):
        return peak, kind
    peak = flops.peak_flops(ASSUMED_DEVICE, dtype)
    assert peak
    return peak, f"{ASSUMED_DEVICE}, as observe.peak_tflops=0"
