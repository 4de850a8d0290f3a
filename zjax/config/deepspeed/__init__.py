"""Settings of zjax from a ds_config.json, with a verdict on each of its keys."""

from zjax.config.deepspeed.known import THEIRS
from zjax.config.deepspeed.sections import (
    check_optimizer_is_given,
    convert,
    read_settings,
)

__all__ = ["THEIRS", "check_optimizer_is_given", "convert", "read_settings"]
