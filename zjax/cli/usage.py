"""Defines commands, formats help texts, and completes commands in shells."""

import dataclasses
import difflib
import functools
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from zjax.errors import ConfigError, Problem
from zjax.settings.describe import setting_paths

HELP_WORDS = ("help", "--help", "-help", "-h")
WIDTH = 80
_INDENT = 33
_KINDS = {
    "int": "INT",
    "float": "NUMBER",
    "string enum": "KIND",
    "comma separated list of strings": "A,B",
}
"""Placeholder of a value in help texts, by absl's type of the flag."""
NO_VALUE = "true"
"""Value of a flag given without a value (`boolean=True` in absl)."""
_NAMED = re.compile(r"--(\w+)=")
_ADDED = re.compile(r"^<[^>]*>: |;\s+repeat this option.*", re.DOTALL)
"""Text that absl adds to the help of a flag."""
_SETTINGS = (
    ("--config=FILE", "Python (.py), Gin (.gin), or a name such as quickstart."),
    ("--ds_config=FILE", "DeepSpeed's configuration, which wins over FILE."),
    ("--config.zero.stage=3", "Changes one setting; `zjax config` lists all."),
    ("--gin_file=FILE, --gin=...", "Gin files, and bindings like config.seed=1."),
)
_COMMON = (
    ("--simulated_devices=8", "Works on CPU devices that are simulated."),
    ("--flagfile=FILE", "Reads more flags from a file, one per line."),
)


OwnFlag = functools.partial[Any]


def flag(
    name: str,
    text: str,
    default: Any = "",
    define: Callable[..., Any] = flags.DEFINE_string,
    **settings: Any,
) -> OwnFlag:
    """Describes a flag: the help text, and absl's function with further arguments."""
    given = {"name": name, "default": default, "help": text}
    return functools.partial(define, **given, **settings)


integer = functools.partial(flag, define=flags.DEFINE_integer)
number = functools.partial(flag, define=flags.DEFINE_float)
switch = functools.partial(flag, default=False, define=flags.DEFINE_bool)
choice = functools.partial(flag, define=flags.DEFINE_enum)
texts = functools.partial(flag, define=flags.DEFINE_list)


@dataclasses.dataclass(frozen=True)
class Command:
    """Command of `zjax` with the flags that it reads, and the texts of its help.

    Attributes:
        run: Function of the parsed flags that runs the command.
        summary: Description of the command in one line.
        examples: Command lines, one per line.
        own: Flags that the command reads besides settings, as `flag` describes them.
        has_settings: Whether the command reads the settings of a run.
        arguments: Usage of the arguments, for commands that parse words themselves.
    """

    run: Callable[[flags.FlagValues], None]
    summary: str
    examples: str
    own: Sequence[OwnFlag] = ()
    has_settings: bool = True
    arguments: str = ""

    def define(self, given: flags.FlagValues) -> None:
        """Defines the command's own flags that `given` lacks."""
        for each in self.own:
            if each.keywords["name"] not in given:
                each(flag_values=given)

    @functools.cached_property
    def flags(self) -> flags.FlagValues:
        """The command's own flags, not parsed."""
        given = flags.FlagValues()
        self.define(given)
        return given


def flags_of(command: Command) -> list[str]:
    """Names of the flags that a command takes, besides changes of single settings."""
    if command.arguments:
        return []
    rows = (*(_SETTINGS if command.has_settings else ()), *_COMMON)
    return [*command.flags, *(n for typed, _ in rows for n in _NAMED.findall(typed))]


def describe_commands(commands: Mapping[str, Command]) -> str:
    """Formats a list of commands, one line each."""
    lines = [f"  {name:14}{commands[name].summary}" for name in commands]
    return "\n".join(
        [
            "zjax trains Flax models that do not fit on one device.",
            "",
            *lines,
            "",
            "zjax COMMAND --help says more about one, zjax --version what is here.",
            "",
        ]
    )


def describe_command(name: str, command: Command) -> str:
    """Formats the help of a command: summary, flags and examples."""
    words = command.arguments or "[--FLAG=VALUE ...]"
    examples = textwrap.indent(command.examples, "  ")
    lines = [f"zjax {name} {words}", "", command.summary, "", "Example:", examples]
    known = [command.flags[flag] for flag in command.flags]
    own = [(_typed(flag), _meaning(flag)) for flag in known]
    if not command.arguments:
        settings = _SETTINGS if command.has_settings else ()
        lines += _section("Flags:", own)
        lines += _section("Settings of the run:", settings)
        lines += _section("Flags of all commands:", _COMMON)
    return "\n".join([*lines, ""])


def check_command(
    name: str, words: Sequence[str], commands: Mapping[str, Command]
) -> None:
    """Refuses an unknown or incomplete command, and names the nearest one.

    `words` are all words of the command line; `name` is the command, or the first word
    if there is none.

    Example:
        >>> check_command("trian", ["trian"], {"train": Command(print, "", "")})
        Traceback (most recent call last):
        zjax.errors.ConfigError: command='trian' is not a command; did you mean train?
    """
    if name in commands:
        return
    two = " ".join(words[:2])
    near = difflib.get_close_matches(two, commands, n=1, cutoff=0.7)
    longer = [command for command in commands if command.startswith(f"{name} ")]
    if longer and not near:
        remedy = f"use zjax {' or zjax '.join(longer)}"
        raise ConfigError(Problem("command", name, "is not complete", remedy))
    if not longer:
        two, near = name, near or difflib.get_close_matches(name, commands, n=1)
    remedy = f"did you mean {near[0]}?" if near else "zjax help lists them"
    raise ConfigError(Problem("command", two, "is not a command", remedy))


def _section(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    """Formats a titled list of flags and meanings, wrapped to the width."""
    lines = ["", title] if rows else []
    margin = " " * _INDENT
    for typed, meaning in rows:
        head = f"  {typed} ".ljust(_INDENT)
        lines += textwrap.wrap(
            meaning, WIDTH, initial_indent=head, subsequent_indent=margin
        )
    return lines


def _typed(flag: flags.Flag) -> str:
    """Formats a flag with the placeholder of its value.

    Example:
        >>> values = flags.FlagValues()
        >>> flags.DEFINE_integer("step", 1, "", flag_values=values).name
        'step'
        >>> _typed(values["step"])
        '--step=INT'
    """
    kind = flag.parser.flag_type()
    if kind == "bool":
        return f"--{flag.name}"
    value = f"={_KINDS.get(kind, 'TEXT')}"
    return f"--{flag.name}[{value}]" if flag.boolean else f"--{flag.name}{value}"


def _meaning(flag: flags.Flag) -> str:
    """Formats the meaning of a flag, with choices and default."""
    parts = [_ADDED.sub("", flag.help)]
    if isinstance(flag.parser, flags.EnumParser):
        known = [value for value in flag.parser.enum_values if value]
        parts.append(f"One of {', '.join(known)}.")
    default = flag.default
    if default:
        words = default if isinstance(default, list) else [str(default)]
        shown = shlex.quote(",".join(words))
        parts.append(f"Default {shown}.")
    return " ".join(parts)


SHELLS = ("bash", "zsh")
_FUNCTION = """\
_zjax() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words="{commands}" settings="{settings}"
  case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
  esac
  [[ $word == --config.* ]] || settings=""
  COMPREPLY=($(compgen -W "$words $settings" -- "$word"))
  [[ ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2> /dev/null
}}
complete -o default -F _zjax zjax
"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


def completion_script(shell: str, commands: Mapping[str, Command]) -> str:
    """Writes the completion script of a shell, one of `SHELLS`."""
    settings = " ".join(f"--config.{path}=" for path in setting_paths())
    firsts = " ".join(dict.fromkeys(name.partition(" ")[0] for name in commands))
    script = _FUNCTION.format(
        commands=f"{firsts} help", settings=settings, cases="\n".join(_cases(commands))
    )
    return _ZSH + script if shell == "zsh" else script


def _cases(commands: Mapping[str, Command]) -> list[str]:
    """Lists cases of the script: words after each command, or after a first word."""
    begun = dict[str, list[str]]()
    words = dict[str, list[str]]()
    for name in commands:
        first, _, second = name.partition(" ")
        if second:
            begun.setdefault(f'"{first} "', []).append(second)
        flags = [f"--{flag}=" for flag in flags_of(commands[name])]
        words[f'"{name} "*'] = ["--help", *flags]
    patterns = (begun | words).items()
    return [f'    {key}) words="{" ".join(found)}" ;;' for key, found in patterns]
