"""Configs that come with zjax are found by name: `quickstart`, `gpt2_124m`.

In a clone they are in `configs/`; a wheel has them in `zjax/configs/`.
"""

import difflib
import os
import pathlib

from zjax.errors import ConfigError, Problem

_PACKAGE = pathlib.Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def find_config(source: str) -> pathlib.Path:
    """The file that a user means by a path or a name.

    Args:
        source: Path of a file, or name of a config that comes with zjax, which has
            neither a suffix nor a folder.

    Returns:
        The path as given, or that of the named config.

    Raises:
        ConfigError: zjax has no config of that name.

    Example:
        >>> find_config("quickstart").name, str(find_config("configs/mine.py"))
        ('quickstart.py', 'configs/mine.py')
    """
    path = pathlib.Path(source)
    if path.suffix or path.name != source:
        return path
    folder = next(filter(pathlib.Path.is_dir, _FOLDERS), _FOLDERS[0])
    names = {file.stem: file for file in folder.glob("*.py")}
    if source in names:
        return names[source]
    (near,) = difflib.get_close_matches(source, names, n=1) or [""]
    remedy = f"did you mean {near}?" if near else "give the path of a .py or .gin file"
    problem = "is not the name of a config of zjax"
    raise ConfigError(Problem("config", source, problem, remedy))


def shipped_name(source: object) -> str:
    """The name of a config that comes with zjax, given by name or path.

    Returns:
        The name; empty for any other source of settings.

    Example:
        >>> shipped_name("quickstart"), shipped_name("mine/quickstart.py")
        ('quickstart', '')
    """
    if not isinstance(source, str | os.PathLike):
        return ""
    path = find_config(os.fspath(source)).absolute()
    return path.stem if path.parent in _FOLDERS else ""
