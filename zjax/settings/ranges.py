"""Legal ranges of all numeric settings."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zjax.errors import Problem
from zjax.settings import schema

MAX_STEPS = 2**31 - 1
"""Largest number of steps: counters of the state are int32."""
MAX_DEVICES = 2**20
MAX_ROWS = 2**24
"""Largest number of rows of a global batch, whose indices are a list on the host."""
MAX_LAYERS = 2**14
MAX_TOKENS = 2**24
"""Largest number of tokens of a sequence, or of a vocabulary."""
MAX_VALUE = 2**32
"""Largest value of a pacing."""
MAX_CYCLE_STEPS = 2**21 - 1
MAX_STAIRS = 2**10
"""Largest number of stairs: stairs x `MAX_CYCLE_STEPS` fits an int32."""
_MAX_WIDTH = 2**22
_MAX_FLOAT, _MIN_FLOAT = 3e38, 1.2e-38
"""Range of float32 without overflow and without subnormal numbers."""
_DAY = 86_400


class Range(NamedTuple):
    """Legal values of a setting, and the remedy for illegal values."""

    contains: Callable[[float], bool]
    remedy: str
    maximum: int | float = _MAX_FLOAT
    minimum: float = -math.inf

    def remedy_for(self, value: int | float) -> str:
        """Remedy for a value out of range; empty for a legal value."""
        if not self.contains(value):
            return self.remedy
        if self.maximum < value < math.inf:
            return f"use at most {self.maximum}"
        return f"use at least {self.minimum}" if value < self.minimum else ""


def _from(low: int, maximum: int = MAX_STEPS) -> Range:
    """Range of finite numbers from `low` on."""
    # Comparisons with NaN are false, so NaN is out of every range.
    return Range(lambda x: low <= x < math.inf, f"use {low} or more", maximum)


def _power_of_two(x: float) -> bool:
    """Whether a number is a power of two."""
    # frexp gives a mantissa in [0.5, 1), which is 0.5 for powers of two only.
    return 0 < x < math.inf and math.frexp(x)[0] == 0.5


POSITIVE = Range(lambda x: 0 < x < math.inf, "use more than 0", minimum=_MIN_FLOAT)
LIMIT = Range(
    lambda x: x > 0, "use more than 0, or inf for no limit", minimum=_MIN_FLOAT
)
FRACTION = Range(lambda x: 0 <= x <= 1, "use 0 to 1")
DECAY = Range(lambda x: 0 <= x < 1, "use 0 or more and less than 1")
POWER_OF_TWO = Range(
    _power_of_two, "use a power of two, such as 65536.0", 2.0**64, 2.0**-64
)
AXIS = Range(
    lambda x: x >= 1 or x == -1, "use 1 or more, or -1 for the rest", MAX_DEVICES
)
OPEN_AXIS = Range(
    lambda x: x >= -1,
    "use 1 or more, -1 for the rest, or 0 for zjax to choose",
    MAX_DEVICES,
)
STEP = Range(lambda x: x >= 1 or x == -1, "use 1 or more, or -1 for never", MAX_STEPS)
SEED = Range(lambda x: 0 <= x < 2**32, "use 0 to 4294967295")

RANGES: dict[type, dict[str, Range]] = {
    schema.Config: {
        "seed": SEED,
        "num_steps": _from(1),
        "num_epochs": _from(0),
        "num_tokens": _from(0),
        "global_batch_size": _from(0, MAX_ROWS),
        "num_microbatches": _from(0, MAX_ROWS),
        "microbatch_size": _from(0, MAX_ROWS),
    },
    schema.Elasticity: {
        "max_batch_size": _from(1, MAX_ROWS),
        "min_shards": _from(1, MAX_DEVICES),
        "max_shards": _from(1, MAX_DEVICES),
        "shards_per_node": _from(0, MAX_DEVICES),
    },
    schema.Mesh: {
        "pipeline": OPEN_AXIS,
        "replica": AXIS,
        "data": AXIS,
        "expert": AXIS,
        "sequence": OPEN_AXIS,
        "tensor": OPEN_AXIS,
    },
    schema.Pipeline: {"num_chunks": _from(2, MAX_LAYERS)},
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
    schema.Precision: {"max_skipped_in_a_row": _from(1)},
    schema.ParamGroup: {
        "learning_rate_scale": _from(0),
        "weight_decay": Range(
            lambda x: 0 <= x < math.inf or x == -1,
            "use 0 or more, or -1 for optimizer.weight_decay",
        ),
    },
    schema.Cycle: {
        "min_learning_rate": _from(0),
        "num_rise_steps": _from(1, MAX_CYCLE_STEPS),
        "num_fall_steps": Range(
            lambda x: x >= -1, "use 0 or more, or -1 for the rise", MAX_CYCLE_STEPS
        ),
        "num_rise_stairs": _from(0, MAX_STAIRS),
        "num_fall_stairs": Range(
            lambda x: x >= -1, "use 0 or more, or -1 for the rise", MAX_STAIRS
        ),
        "decay_rate": _from(0),
        "num_decay_steps": _from(1),
        "min_momentum": DECAY,
        "max_momentum": DECAY,
        "momentum_decay_rate": _from(0),
    },
    schema.RangeTest: {
        "start_learning_rate": POSITIVE,
        "growth": _from(0),
        "num_steps": _from(1),
    },
    schema.Optimizer: {
        "peak_learning_rate": POSITIVE,
        "num_warmup_steps": Range(
            lambda x: x >= -1, "use 0 or more, or -1 for a tenth of the run", MAX_STEPS
        ),
        "final_learning_rate_fraction": FRACTION,
        "decay_fraction": FRACTION,
        "b1": DECAY,
        "b2": DECAY,
        "eps": POSITIVE,
        "weight_decay": _from(0),
        "clip_norm": LIMIT,
        "ema_decay": DECAY,
        "freeze_step": _from(0),
        "var_update_scaler": _from(1),
        "local_step_scaler": _from(0),
        "local_step_clipper": _from(1),
    },
    schema.Lora: {
        "rank": _from(0),
        "alpha": POSITIVE,
        "dropout": DECAY,
        "block_size": _from(2),
    },
    schema.Pacing: {
        "start": _from(0, MAX_VALUE),
        "end": _from(0, MAX_VALUE),
        "num_steps": _from(1),
        "num_tokens": _from(0),
        "multiple": _from(0, MAX_VALUE),
        "degree": _from(1, 64),
    },
    schema.Buckets: {
        "shortest": _from(1, MAX_TOKENS),
        "num_cycles": _from(1, MAX_ROWS),
    },
    schema.LayerDrop: {
        "theta": Range(lambda x: 0 < x <= 1, "use more than 0, up to 1"),
        "gamma": _from(0),
    },
    schema.Communication: {
        "num_local_steps": _from(0),
        "num_synchronous_steps": _from(0),
        "outer_learning_rate": POSITIVE,
        "outer_momentum": DECAY,
        "num_fragments": _from(1),
        "delay": _from(0),
        "mixing": DECAY,
    },
    schema.RopeScaling: {
        "factor": _from(1),
        "original_length": _from(0, MAX_TOKENS),
        "low_frequency_factor": POSITIVE,
        "high_frequency_factor": POSITIVE,
        "beta_fast": POSITIVE,
        "beta_slow": POSITIVE,
        "attention_factor": _from(0),
        "mscale": _from(0),
        "mscale_all_dim": _from(0),
    },
    schema.Latent: {
        name: _from(0, _MAX_WIDTH)
        for name in ("key_rank", "query_rank", "plain_size", "value_size")
    },
    schema.Sparsity: {
        "num_local_blocks": _from(1, MAX_TOKENS),
        "num_global_blocks": _from(0, MAX_TOKENS),
        "num_different_global_patterns": _from(1, MAX_TOKENS),
        "num_random_blocks": _from(-1, MAX_TOKENS),
        "num_sliding_window_blocks": _from(1, MAX_TOKENS),
        "seed": SEED,
    },
    schema.MoE: {
        "top_k": _from(1, _MAX_WIDTH),
        "every": _from(1, MAX_LAYERS),
        "first_dense": _from(0, MAX_LAYERS),
        "expert_size": _from(0, _MAX_WIDTH),
        "num_shared": _from(0, _MAX_WIDTH),
        "scale": POSITIVE,
        "num_groups": _from(1, _MAX_WIDTH),
        "top_groups": _from(1, _MAX_WIDTH),
        "jitter": DECAY,
        "capacity_factor": POSITIVE,
        "eval_capacity_factor": POSITIVE,
        "min_capacity": _from(1, MAX_TOKENS),
        "balance_loss": _from(0),
        "bias_rate": _from(0),
        "z_loss": _from(0),
    },
    schema.Model: {
        "num_layers": _from(1, MAX_LAYERS),
        "embed_size": _from(1, _MAX_WIDTH),
        "mlp_size": _from(0, _MAX_WIDTH),
        "mlp_tiles": _from(1, _MAX_WIDTH),
        "num_heads": _from(1, _MAX_WIDTH),
        "num_kv_heads": _from(0, _MAX_WIDTH),
        "head_size": _from(0, _MAX_WIDTH),
        "vocab_size": Range(
            lambda x: x >= 2, "use 2 or more, or 0 to derive it", MAX_TOKENS
        ),
        "max_length": _from(1, MAX_TOKENS),
        "max_positions": _from(0, MAX_TOKENS),
        "norm_eps": POSITIVE,
        "first_position": _from(0, MAX_TOKENS),
        "num_token_types": _from(0, MAX_TOKENS),
        "rope_theta": POSITIVE,
        "rotary_size": _from(0, _MAX_WIDTH),
        "local_rope_theta": _from(0),
        "sliding_window": _from(0, MAX_TOKENS),
        "full_attention_every": _from(0, MAX_LAYERS),
        "attention_soft_cap": _from(0),
        "logit_soft_cap": _from(0),
        "query_scale_size": _from(0, _MAX_WIDTH),
        "dropout_rate": DECAY,
        "embedding_dropout_rate": Range(
            lambda x: x == -1 or 0 <= x < 1, "use 0 or more and less than 1, or -1"
        ),
        "attention_dropout_rate": DECAY,
        "layers_per_scan": _from(0, MAX_LAYERS),
        "loss_chunk_tokens": _from(0),
        "mlp_chunk_tokens": _from(0),
        "z_loss": _from(0),
    },
    schema.Data: {
        "length": _from(0, MAX_TOKENS),
        "num_workers": _from(0, 1_024),
        "prefetch_batches": _from(0, 1_024),
    },
    schema.Masking: {
        "fraction": Range(lambda x: 0 < x <= 1, "use more than 0, up to 1"),
        "mask_id": _from(-1, MAX_TOKENS),
    },
    schema.Evaluation: {
        "every_steps": _from(0),
        "num_batches": _from(-1),
        "patience": _from(0),
        "min_improvement": _from(0),
    },
    schema.Checkpoint: {
        "every_steps": _from(0),
        "keep_last": _from(1),
        "keep_best": _from(0),
        "expert_noise": _from(0),
    },
    schema.Distill: {
        "weight": POSITIVE,
        "temperature": POSITIVE,
        "fraction": FRACTION,
    },
    schema.Observe: {
        "log_every_steps": _from(1),
        "profile_start_step": STEP,
        "profile_num_steps": _from(1),
        "peak_tflops": _from(0),
    },
    schema.Processes: {
        "num_processes": _from(0, MAX_DEVICES),
        "process_id": _from(-1, MAX_DEVICES),
        "heartbeat_seconds": _from(1, _DAY),
    },
}
"""Ranges by section and setting; a test keeps the table complete."""


def range_problems(section: Any, path: str = "") -> Iterator[Problem]:
    """Yields a problem for each number out of range, in a section and nested sections.

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
        elif allowed and allowed.remedy_for(value):
            yield Problem(name, value, "is out of range", allowed.remedy_for(value))
