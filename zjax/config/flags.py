"""Defines and parses flags: one config file, Python or Gin, and single changes.

A change has one syntax everywhere: `--config.zero.stage=3`, a Gin binding
`config.zero.stage=3`, an override of `load_config`. Flags only collect texts, which
lets all mistakes be reported at once.
"""

import difflib
import re
import sys
from collections.abc import Sequence

from absl import flags

from zjax import deepspeed
from zjax.config import gin, load
from zjax.errors import ConfigError, Problem
from zjax.settings import schema
from zjax.settings.ranges import MAX_DEVICES

MAX_VALUES = {
    "simulated_devices": 4_096,
    "num_devices": MAX_DEVICES,
    "devices_per_host": MAX_DEVICES,
    "num_params": 10**18,
    "device_gb": 10**6,
    "top_k": 10**9,
    "seed": 2**32 - 1,
}
"""Largest values of numeric flags; the smallest value is 0."""
FILE_FLAGS = ("config", "ds_config", "gin", "gin_file")
"""Flags that name sources of settings, besides changes of single settings."""


def define_flags(
    argv: Sequence[str] | None = None, flag_values: flags.FlagValues = flags.FLAGS
) -> None:
    """Defines `--config`, `--gin_file`, `--gin`, and each `--config.x.y` in `argv`.

    Flags are not defined at import, because programs with flags import zjax as a
    library. May be called repeatedly.
    """
    if "config" not in flag_values:
        flags.DEFINE_string(
            "config",
            None,
            "Config file (.py or .gin), or the name of one that comes with zjax. "
            "--config.x.y=value changes single settings.",
            flag_values=flag_values,
        )
        flags.DEFINE_string(
            "ds_config",
            None,
            "DeepSpeed's configuration (.json), whose settings win over those of the "
            "config file; see zjax convert.",
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
    # absl refuses undefined flags, and the schema has too many paths to define all.
    arguments = sys.argv if argv is None else argv
    try:
        read = flag_values.read_flags_from_files(list(arguments), force_gnu=False)
    except flags.Error as error:
        raise ConfigError(_flag_problem(error, flag_values)) from error
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
    """Parses a command line; returns the program and the positional arguments."""
    try:
        return flag_values(argv)
    except flags.Error as error:
        raise ConfigError(_flag_problem(error, flag_values)) from error


def _flag_problem(error: flags.Error, flag_values: flags.FlagValues) -> Problem:
    """Turns an error of absl into a problem with a remedy."""
    text = str(error)
    if isinstance(error, flags.UnrecognizedFlagError):
        name, value = error.flagname, str(error.flagvalue).partition("=")[2]
        matches = difflib.get_close_matches(name, list(flag_values), n=1)
        remedy = f"did you mean --{matches[0]}?" if matches else "see zjax help"
        return Problem(f"--{name}", value, "is not a flag", remedy)
    if illegal := re.match("flag --([^=]+)=", text):
        name, why = illegal[1], f": {error.__context__}"
        value = text[illegal.end() :].removesuffix(why)
        return Problem(f"--{name}", value, *_value_problem(flag_values[name].parser))
    if missing := re.match("Missing value for flag -*(.+)", text):
        name = f"--{missing[1]}"
        return Problem(name, "", "has no value", f"write {name}=VALUE")
    return Problem("--flagfile", "given", f"cannot be read ({text})", "mend it")


def _value_problem(parser: flags.ArgumentParser) -> tuple[str, str]:
    """Problem and remedy of a value that a flag parser refuses."""
    if isinstance(parser, flags.EnumParser):
        known = [value for value in parser.enum_values if value]
        return "is not a choice", f"use one of {', '.join(known)}"
    if isinstance(parser, flags.BooleanParser):
        return "is not a bool", "use true or false"
    return f"is not {parser.syntactic_help}", "use one"


def settings_given(flag_values: flags.FlagValues) -> list[str]:
    """Names of the given flags that set a run, such as `config` and `config.seed`."""
    return [
        name
        for name in flag_values
        if (name in FILE_FLAGS or name.startswith("config."))
        and flag_values[name].present
    ]


def changes_given(flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Changes of single settings that were given, such as `config.seed=1`."""
    return [
        f"{name}={flag_values[name].value}"
        for name in flag_values
        if name.startswith("config.") and flag_values[name].value is not None
    ]


def refuse_flags(
    flag_values: flags.FlagValues, names: Sequence[str], problem: str
) -> None:
    """Refuses named flags that were given, because they have no effect."""
    problems = [
        Problem(f"--{name}", flag_values[name].value, problem, "leave it out")
        for name in names
        if flag_values[name].present
    ]
    if problems:
        raise ConfigError(*problems)


def check_numbers(flag_values: flags.FlagValues) -> None:
    """Refuses numeric flags that are NaN or out of range, all at once."""
    problems = [
        Problem(
            f"--{name}",
            flag_values[name].value,
            "is out of range",
            f"use 0 to {maximum}",
        )
        for name, maximum in MAX_VALUES.items()
        # NaN fails both comparisons.
        if name in flag_values and not 0 <= (flag_values[name].value or 0) <= maximum
    ]
    if problems:
        raise ConfigError(*problems)


def config_from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> schema.Config:
    """Builds the config that the command line describes."""
    path = flag_values["config"].value
    files = flag_values["gin_file"].value or []
    bindings = flag_values["gin"].value or []
    changes = changes_given(flag_values)
    ds_config = flag_values["ds_config"].value
    if not (path or ds_config or changes or files or bindings):
        remedy = "use --config=quickstart, or --gin_file"
        raise ConfigError(Problem("config", "", "is not given", remedy))
    if not (files or bindings):
        theirs = [deepspeed.read_settings(ds_config)] if ds_config else []
        return load.load_config(path or {}, *theirs, *changes)
    if path or ds_config or changes:
        other = path or ds_config or changes[0]
        given = f"--gin_file={files[0]}" if files else f"--gin={bindings[0]}"
        remedy = "use either --config or Gin, not both"
        raise ConfigError(Problem("config", other, f"conflicts with {given}", remedy))
    return gin.from_gin(files, bindings)
