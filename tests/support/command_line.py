"""Flags as a command line gives them."""

from zjax.cli.main import flags_given


def typed(name, *words):
    """The flags of a command, with what is typed behind it."""
    given = flags_given(name, ["zjax", *words])
    given(["zjax", *words])
    return given
