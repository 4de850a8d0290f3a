"""Flags of the process, set as a command line sets them, and restored."""

import contextlib

from absl import flags

from zjax.cli.main import define_flags
from zjax.config import flags as config_flags


@contextlib.contextmanager
def typed(*words):
    """Parses a command line over the defaults, for the enclosed work.

    Flags that libraries define meanwhile stay, unlike in `absl.testing.flagsaver`.
    """
    if "prompt" not in flags.FLAGS:
        define_flags(["zjax"])
    config_flags.define_flags(["zjax", *words])
    before = {name: (flags.FLAGS[name].value, 0) for name in flags.FLAGS}
    try:
        flags.FLAGS(["zjax", *words])
        yield
    finally:
        for name, (value, present) in before.items():
            flags.FLAGS[name].value, flags.FLAGS[name].present = value, present
