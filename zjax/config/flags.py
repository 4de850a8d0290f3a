"""Command-line flags: one config file, Python or Gin, and changes to single settings.

A change has the same text on every way in: `--config.zero.stage=3`, a Gin binding
`config.zero.stage=3`, an override of `load_config`. The flags only collect texts, so
that all mistakes are reported together and in one form.
"""

import difflib
import re
import sys
from collections.abc import Sequence

from absl import flags

from zjax.config import gin, load, schema
from zjax.config.ranges import MOST_DEVICES
from zjax.errors import ConfigError, Problem

MOST = {
    "simulated_devices": 4_096,
    "num_devices": MOST_DEVICES,
    "devices_per_host": MOST_DEVICES,
    "num_params": 10**18,
    "device_gb": 10**6,
}
"""The largest number of each flag that has one; the least is 0."""


def define_flags(
    argv: Sequence[str] | None = None, flag_values: flags.FlagValues = flags.FLAGS
) -> None:
    """Defines `--config`, `--gin_file`, `--gin`, and each `--config.x.y` in `argv`.

    Nothing is defined before this is called, as zjax is also a library; calling it
    again changes nothing.

    Args:
        argv: Arguments to look for changed settings in; by default those of this
            process.
        flag_values: Where flags are defined.

    Raises:
        ConfigError: A file of flags cannot be read.
    """
    if "config" not in flag_values:
        flags.DEFINE_string(
            "config",
            None,
            "Config file (.py or .gin). --config.x.y=value changes single settings.",
            flag_values=flag_values,
        )
        flags.DEFINE_multi_string(
            "gin_file", [], "Gin file; may be repeated.", flag_values=flag_values
        )
        flags.DEFINE_multi_string(
            "gin",
            [],
            "Gin binding such as config.zero.stage=3; may be repeated.",
            flag_values=flag_values,
        )
    arguments = sys.argv if argv is None else argv
    try:
        read = flag_values.read_flags_from_files(list(arguments), force_gnu=False)
    except flags.Error as error:
        raise ConfigError(_mistake(error, flag_values)) from error
    for argument in read:
        name = argument.lstrip("-").partition("=")[0]
        is_change = argument.startswith("-") and name.startswith("config.")
        if is_change and name not in flag_values:
            flags.DEFINE_string(
                name, None, "Changes this setting.", flag_values=flag_values
            )


def parse(
    argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS
) -> list[str]:
    """Reads the flags of a command line.

    Args:
        argv: Its words, the program first.
        flag_values: Flags, defined.

    Returns:
        The words that are no flags, the program first.

    Raises:
        ConfigError: A flag is unknown, or its value cannot be one.
    """
    try:
        return flag_values(argv)
    except flags.Error as error:
        raise ConfigError(_mistake(error, flag_values)) from error


def _mistake(error: flags.Error, flag_values: flags.FlagValues) -> Problem:
    """What absl says of one flag, in our own terms."""
    text = str(error)
    if isinstance(error, flags.UnrecognizedFlagError):
        name, value = error.flagname, str(error.flagvalue).partition("=")[2]
        near = difflib.get_close_matches(name, list(flag_values), n=1)
        remedy = f"did you mean --{near[0]}?" if near else "see zjax help"
        return Problem(f"--{name}", value, "is not a flag", remedy)
    if illegal := re.match("flag --([^=]+)=", text):
        name, why = illegal[1], f": {error.__context__}"
        value = text[illegal.end() :].removesuffix(why)
        return Problem(f"--{name}", value, *_unlike(flag_values[name].parser))
    if missing := re.match("Missing value for flag -*(.+)", text):
        name = f"--{missing[1]}"
        return Problem(name, "", "has no value", f"write {name}=VALUE")
    return Problem("--flagfile", "given", f"cannot be read ({text})", "mend it")


def _unlike(parser: flags.ArgumentParser) -> tuple[str, str]:
    """What is wrong with a value that a parser refuses, and what it takes."""
    if isinstance(parser, flags.EnumParser):
        known = [value for value in parser.enum_values if value]
        return "is not a choice", f"use one of {', '.join(known)}"
    if isinstance(parser, flags.BooleanParser):
        return "is not a bool", "use true or false"
    return f"is not {parser.syntactic_help}", "use one"


def settings_given(flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """The flags of the command line that set a run.

    Args:
        flag_values: Flags, parsed.

    Returns:
        Names, such as `config` and `config.seed`.
    """
    files = ("config", "gin", "gin_file")
    return [
        name
        for name in flag_values
        if (name in files or name.startswith("config.")) and flag_values[name].present
    ]


def refuse_flags(
    names: Sequence[str],
    problem: str,
    remedy: str = "leave it out",
    flag_values: flags.FlagValues = flags.FLAGS,
) -> None:
    """Refuses flags that nothing would read.

    Args:
        names: Of flags that have no effect.
        problem: Why.
        remedy: What to do instead.
        flag_values: Flags, parsed.

    Raises:
        ConfigError: Names every one of them that is given.
    """
    problems = [
        Problem(f"--{name}", flag_values[name].value, problem, remedy)
        for name in names
        if flag_values[name].present
    ]
    if problems:
        raise ConfigError(*problems)


def check_numbers(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Refuses numbers of the command line that nothing could count; NaN is one.

    Args:
        flag_values: Flags, parsed.

    Raises:
        ConfigError: Names every flag out of range.
    """
    problems = [
        Problem(
            f"--{name}", flag_values[name].value, "is out of range", f"use 0 to {most}"
        )
        for name, most in MOST.items()
        if not 0 <= (flag_values[name].value or 0) <= most
    ]
    if problems:
        raise ConfigError(*problems)


def config_from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> schema.Config:
    """Reads the config that the command line describes.

    Args:
        flag_values: Flags that `define_flags` defined, parsed.

    Returns:
        The frozen config.

    Raises:
        ConfigError: No file and no change was given, both kinds of file were, or the
            settings are unknown or of the wrong type, all of them at once.
    """
    path = flag_values["config"].value
    files = flag_values["gin_file"].value or []
    bindings = flag_values["gin"].value or []
    changes = [
        f"{name}={flag_values[name].value}"
        for name in flag_values
        if name.startswith("config.") and flag_values[name].value is not None
    ]
    if not (path or changes or files or bindings):
        remedy = "use --config=configs/quickstart.py, or --gin_file"
        raise ConfigError(Problem("config", "", "is not given", remedy))
    if not (files or bindings):
        return load.load_config(path or {}, *changes)
    if path or changes:
        other = path or changes[0]
        given = f"--gin_file={files[0]}" if files else f"--gin={bindings[0]}"
        remedy = "use either --config or Gin, not both"
        raise ConfigError(Problem("config", other, f"meets {given}", remedy))
    return gin.from_gin(files, bindings)
