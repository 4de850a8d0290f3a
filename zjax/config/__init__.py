"""The settings of a run: one frozen schema, its front ends and its checks."""

from zjax.config.batch import BatchSizes, resolve_batch
from zjax.config.check import check_config, check_processes
from zjax.config.convert import base, from_mapping, to_mapping
from zjax.config.describe import describe_config, describe_settings
from zjax.config.load import load_config
from zjax.config.schema import Config

__all__ = [
    "BatchSizes",
    "Config",
    "base",
    "check_config",
    "check_processes",
    "describe_config",
    "describe_settings",
    "from_mapping",
    "load_config",
    "resolve_batch",
    "to_mapping",
]
