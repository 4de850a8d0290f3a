"""Cases of block-sparse attention, and the metrics that both sides print of them.

One case is a layout, a length, a head size and a pass. What is printed of it are calls
per second; a pass backward is always timed with the one forward.
"""

import dataclasses
import statistics
from typing import Any

import numpy as np
import timing

BLOCK = 128
HEADS = 16
PASSES = ("forward", "both")


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch of one sequence.

    Args:
        layout: Name of the layout.
        length: Tokens.
        head_size: Channels per head.
    """

    layout: str
    length: int
    head_size: int

    @property
    def name(self) -> str:
        return f"{self.layout} {self.length // 1024}k hd{self.head_size}"

    def metric(self, which: str) -> str:
        return f"{self.name} {which}"


def bigbird(num_blocks: int) -> np.ndarray:
    """Three random blocks a row, the row's own and its neighbour, the first column."""
    rng = np.random.default_rng(0)
    rows = np.arange(num_blocks)
    live = np.abs(rows[:, None] - rows) <= 1
    for row in rows:
        live[row, rng.choice(row + 1, min(3, row + 1), replace=False)] = True
    live[:, 0] = True
    return np.tril(live)


def window(num_blocks: int) -> np.ndarray:
    """The row's own block and the seven before it, and the first column."""
    rows = np.arange(num_blocks)
    live = rows[:, None] - rows < 8
    live[:, 0] = True
    return np.tril(live)


def fixed(num_blocks: int) -> np.ndarray:
    """Windows of sixteen blocks, the last of each seen by all that come later."""
    rows = np.arange(num_blocks)
    live = rows[:, None] // 16 == rows // 16
    live[:, 15::16] = True
    return np.tril(live)


def small(num_blocks: int) -> np.ndarray:
    """DeepSpeed's default: windows of four blocks, the last of each seen by all."""
    rows = np.arange(num_blocks)
    live = rows[:, None] // 4 == rows // 4
    live[:, 3::4] = True
    return live


CAUSAL = {"bigbird": bigbird, "window": window, "fixed": fixed}
SIZES = [(length, size) for length in (2**14, 2**16) for size in (64, 128)]
LAYOUTS = [Case(layout, *size) for layout in ("bigbird", "window") for size in SIZES]
TUNED = [case for case in LAYOUTS if case.length == 2**14]
"""Against FlexAttention: at 64k tokens torch alone takes minutes to try its tiles."""
BOTH_WAYS = Case("dense both ways", 2**14, 128)
DENSE = [
    *(Case("dense", *size) for size in SIZES),
    Case("dense", 2**17, 128),
    BOTH_WAYS,
]
SMALL, SMALL_BLOCK = Case("small blocks", 2**14, 128), 16


def share_of_dense(metrics: dict[str, Any]) -> dict[str, Any]:
    """Seconds per call if small blocks cost their share of what dense ones do."""
    density = small(SMALL.length // SMALL_BLOCK).mean()
    shares = {}
    for which in PASSES:
        found = metrics.get(f"{BOTH_WAYS.metric(which)} seconds")
        if found:
            scaled = {name: found[name] * density for name in ("median", "min", "max")}
            shares[f"{SMALL.metric(which)} seconds"] = scaled | {"n": found["n"]}
    return shares


def live_pairs(layout: str, length: int) -> float:
    """Pairs of tokens that see each other, causality cutting the diagonal."""
    if layout == "dense":
        return length * (length + 1) / 2
    if layout == "dense both ways":
        return float(length) ** 2
    live = CAUSAL[layout](length // BLOCK)
    return live.sum() * BLOCK**2 - length * (BLOCK - 1) / 2


def flops(case: Case, which: str) -> float:
    """Of products on live pairs: two forward, five backward."""
    each = 2 * HEADS * case.head_size * live_pairs(case.layout, case.length)
    return each * {"forward": 2, "backward": 5}[which]


def describe(case: Case, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds per call, calls per second, and TFLOP/s where live pairs are known.

    The backward pass is what both take less the median of the one forward.
    """
    metrics = {
        case.metric(which): timing.spread([1 / each for each in found])
        for which, found in seconds.items()
    }
    for which, found in seconds.items():
        metrics[f"{case.metric(which)} seconds"] = timing.spread(found)
    if case.layout in CAUSAL or case.layout.startswith("dense"):
        forward = statistics.median(seconds["forward"])
        backward = [both - forward for both in seconds["both"]]
        for which, found in (("forward", seconds["forward"]), ("backward", backward)):
            rate = [flops(case, which) / 1e12 / each for each in found]
            metrics[f"{case.metric(which)} TFLOP/s"] = timing.spread(rate)
    return metrics
