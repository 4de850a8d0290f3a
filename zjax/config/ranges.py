"""The legal range of every number among the settings."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zjax.config import schema
from zjax.errors import Problem

MOST_STEPS = 2**31 - 1
"""What the counters of a state hold, which are int32."""
MOST_DEVICES = 2**20
MOST_ROWS = 2**24
"""Rows of a global batch: their numbers are a list on the host."""
MOST_LAYERS = 2**14
MOST_TOKENS = 2**24
"""Of a sequence, and of a vocabulary."""
_MOST_WIDTH = 2**22
_MOST_FLOAT, _LEAST_FLOAT = 3e38, 1.2e-38
"""What float32 holds without infinity, and without underflow."""
_DAY = 86_400


class Range(NamedTuple):
    """Numbers that a setting may take."""

    holds: Callable[[float], bool]
    remedy: str
    most: int | float = _MOST_FLOAT
    least: float = -math.inf

    def misfit(self, value: int | float) -> str:
        """The remedy for a value outside; empty for one inside."""
        if not self.holds(value):
            return self.remedy
        if self.most < value < math.inf:
            return f"use at most {self.most}"
        return f"use at least {self.least}" if value < self.least else ""


def _from(low: int, most: int = MOST_STEPS) -> Range:
    return Range(lambda x: low <= x < math.inf, f"use {low} or more", most)


def _power_of_two(x: float) -> bool:
    return 0 < x < math.inf and math.frexp(x)[0] == 0.5


POSITIVE = Range(lambda x: 0 < x < math.inf, "use more than 0", least=_LEAST_FLOAT)
LIMIT = Range(
    lambda x: x > 0, "use more than 0, or inf for no limit", least=_LEAST_FLOAT
)
FRACTION = Range(lambda x: 0 <= x <= 1, "use 0 to 1")
DECAY = Range(lambda x: 0 <= x < 1, "use 0 or more and less than 1")
POWER_OF_TWO = Range(
    _power_of_two, "use a power of two, such as 65536.0", 2.0**64, 2.0**-64
)
AXIS = Range(
    lambda x: x >= 1 or x == -1, "use 1 or more, or -1 for the rest", MOST_DEVICES
)
OPEN_AXIS = Range(
    lambda x: x >= -1,
    "use 1 or more, -1 for the rest, or 0 for zjax to choose",
    MOST_DEVICES,
)
STEP = Range(lambda x: x >= 1 or x == -1, "use 1 or more, or -1 for never", MOST_STEPS)
SEED = Range(lambda x: 0 <= x < 2**32, "use 0 to 4294967295")

RANGES: dict[type, dict[str, Range]] = {
    schema.Config: {
        "seed": SEED,
        "num_steps": _from(1),
        "global_batch_size": _from(0, MOST_ROWS),
        "num_microbatches": _from(0, MOST_ROWS),
        "microbatch_size": _from(0, MOST_ROWS),
    },
    schema.Mesh: {
        "pipeline": OPEN_AXIS,
        "replica": AXIS,
        "data": AXIS,
        "expert": AXIS,
        "sequence": OPEN_AXIS,
        "tensor": OPEN_AXIS,
    },
    schema.Pipeline: {"num_chunks": _from(2, MOST_LAYERS)},
    schema.Zero: {
        "min_shard_elements": _from(0, 2**63 - 1),
        "delay_updates_from": STEP,
    },
    schema.LossScale: {
        "initial": POWER_OF_TWO,
        "window": _from(0),
        "hysteresis": _from(1),
        "minimum": POWER_OF_TWO,
    },
    schema.ParamGroup: {
        "learning_rate_scale": _from(0),
        "weight_decay": Range(
            lambda x: 0 <= x < math.inf or x == -1,
            "use 0 or more, or -1 for optimizer.weight_decay",
        ),
    },
    schema.Optimizer: {
        "peak_learning_rate": POSITIVE,
        "num_warmup_steps": _from(0),
        "final_learning_rate_fraction": FRACTION,
        "decay_fraction": FRACTION,
        "b1": DECAY,
        "b2": DECAY,
        "eps": POSITIVE,
        "weight_decay": _from(0),
        "clip_norm": LIMIT,
        "ema_decay": DECAY,
    },
    schema.Sparsity: {
        "num_local_blocks": _from(1, MOST_TOKENS),
        "num_global_blocks": _from(0, MOST_TOKENS),
        "num_different_global_patterns": _from(1, MOST_TOKENS),
        "num_random_blocks": _from(-1, MOST_TOKENS),
        "num_sliding_window_blocks": _from(1, MOST_TOKENS),
        "seed": SEED,
    },
    schema.Model: {
        "num_layers": _from(1, MOST_LAYERS),
        "embed_size": _from(1, _MOST_WIDTH),
        "mlp_size": _from(0, _MOST_WIDTH),
        "mlp_tiles": _from(1, _MOST_WIDTH),
        "num_heads": _from(1, _MOST_WIDTH),
        "num_kv_heads": _from(0, _MOST_WIDTH),
        "vocab_size": Range(
            lambda x: x >= 2, "use 2 or more, or 0 to derive it", MOST_TOKENS
        ),
        "max_length": _from(1, MOST_TOKENS),
        "norm_eps": POSITIVE,
        "rope_theta": POSITIVE,
        "dropout_rate": DECAY,
        "layers_per_scan": _from(0, MOST_LAYERS),
        "loss_chunk_tokens": _from(0),
        "z_loss": _from(0),
    },
    schema.Data: {
        "length": _from(0, MOST_TOKENS),
        "num_workers": _from(0, 1_024),
        "prefetch_batches": _from(0, 1_024),
    },
    schema.Evaluation: {"every_steps": _from(0), "num_batches": _from(-1)},
    schema.Checkpoint: {
        "every_steps": _from(0),
        "keep_last": _from(1),
        "keep_best": _from(0),
    },
    schema.Observe: {
        "log_every_steps": _from(1),
        "profile_start_step": STEP,
        "profile_num_steps": _from(1),
        "peak_tflops": _from(0),
    },
    schema.Processes: {
        "num_processes": _from(0, MOST_DEVICES),
        "process_id": _from(-1, MOST_DEVICES),
        "heartbeat_seconds": _from(1, _DAY),
    },
}
"""By section and setting. A test keeps the table complete."""


def range_problems(section: Any, path: str = "") -> Iterator[Problem]:
    """Finds numbers out of range in a section and all sections inside it.

    Args:
        section: A section of the schema.
        path: Its dotted path, for the problems.

    Yields:
        One problem per number.

    Example:
        >>> print(*range_problems(schema.Config(num_steps=0)))
        num_steps=0 is out of range; use 1 or more
    """
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = f"{path}.{field.name}" if path else field.name
        allowed = RANGES.get(type(section), {}).get(field.name)
        if dataclasses.is_dataclass(value):
            yield from range_problems(value, name)
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                if dataclasses.is_dataclass(entry):
                    yield from range_problems(entry, f"{name}[{index}]")
        elif allowed and allowed.misfit(value):
            yield Problem(name, value, "is out of range", allowed.misfit(value))
