"""Reads settings from files and flags, and checks rules between settings."""

from zjax.config.check import check_config, check_processes
from zjax.config.load import load_config
from zjax.settings.batch import BatchSizes, resolve_batch
from zjax.settings.convert import from_mapping
from zjax.settings.describe import describe_config, describe_settings
from zjax.settings.mappings import base, to_mapping
from zjax.settings.schema import Config

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
