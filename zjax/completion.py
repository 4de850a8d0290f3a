"""`zjax completion`: how a shell completes commands, flags and settings."""

from collections.abc import Mapping

from zjax.config.describe import setting_paths
from zjax.usage import Command, flags_of

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
    """The script of a shell, which completes the words after `zjax`.

    Args:
        shell: One of `SHELLS`.
        commands: Commands by name.

    Example:
        >>> commands = {"train": Command(print, "Trains.", "", {"prompt": ""})}
        >>> "--prompt=" in completion_script("bash", commands)
        True
    """
    settings = " ".join(f"--config.{path}=" for path in setting_paths())
    firsts = " ".join(dict.fromkeys(name.partition(" ")[0] for name in commands))
    script = _FUNCTION.format(
        commands=f"{firsts} help", settings=settings, cases="\n".join(_cases(commands))
    )
    return _ZSH + script if shell == "zsh" else script


def _cases(commands: Mapping[str, Command]) -> list[str]:
    """What may follow each command, and each word that begins several."""
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
