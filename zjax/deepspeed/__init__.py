"""Settings of zjax from a ds_config.json, with a verdict on each of its keys."""

from zjax.deepspeed.known import THEIRS
from zjax.deepspeed.sections import check_optimizer_is_given, convert, read_settings

__all__ = ["THEIRS", "check_optimizer_is_given", "convert", "read_settings"]
