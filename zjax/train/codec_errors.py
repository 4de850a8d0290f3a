"""Describes the error-feedback arrays of a state, which later messages make up for.

An error belongs to the next message of the same numbers, in the same unit and the same
place of the buffer; a run that sends other messages starts with errors of 0.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax

from zjax.config.schema import Config
from zjax.optim.phases import make_phases

KEY = "codec_errors"
"""Where a checkpoint keeps the description."""


def describe_errors(rows: Any, config: Config, step: int) -> str:
    """A checksum of all that gives errors their meaning.

    Args:
        rows: TrainState of the plans of a state.
        config: Read for `communication`, `optimizer`, `zero` and `num_steps`.
        step: Steps taken, 0 or more.
    """
    phases = make_phases(config)
    units = None
    if phases is not None and phases.freeze_step:
        optimizer, is_frozen = config.optimizer, step >= phases.freeze_step
        units = optimizer.name, optimizer.bias_correction, is_frozen
    settings = config.communication
    masters = jax.tree.leaves(rows.master)
    places = [(row.path, row.stored_shape, str(row.stored)) for row in masters]
    message = [units, settings.codec, settings.num_fragments, config.zero.stage, places]
    return hashlib.sha256(json.dumps(message).encode()).hexdigest()[:16]


def fit(rows: Any, config: Config, saved: Mapping[str, Any], step: int) -> bool:
    """Whether the errors of a checkpoint fit the next messages of a run.

    Args:
        rows: TrainState of the plans of the run.
        config: Settings of the run.
        saved: What the checkpoint keeps beside its arrays.
        step: Step of the checkpoint.
    """
    return saved.get(KEY) == describe_errors(rows, config, step)
