"""Converts a ds_config.json to settings of zjax, with a verdict on each key."""

from zjax.deepspeed.sections import (
    THEIRS,
    check_optimizer_is_given,
    convert,
    read,
    read_settings,
)

__all__ = ["THEIRS", "check_optimizer_is_given", "convert", "read", "read_settings"]
