"""Converts a ds_config.json to settings of zjax, with a verdict on each key."""

from zjax.deepspeed.known import THEIRS
from zjax.deepspeed.sections import check_optimizer_is_given, convert, read_settings

__all__ = ["THEIRS", "check_optimizer_is_given", "convert", "read_settings"]
