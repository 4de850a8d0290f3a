"""`zjax convert`: the settings that a ds_config.json of DeepSpeed amounts to."""

import pathlib
import sys

from zjax.commands import Parser
from zjax.config.deepspeed import convert, report
from zjax.config.deepspeed.conversion import Conversion
from zjax.config.deepspeed.reading import read_file
from zjax.config.paths import local_path
from zjax.sharding.describe import render_table


def convert_file() -> None:
    """Prints a config file, and on stderr what becomes of each key of DeepSpeed.

    It exits with status 1 where keys are not supported.
    """
    parser = Parser("zjax convert", allow_abbrev=False)
    parser.add_argument("file", help="ds_config.json of DeepSpeed")
    given = parser.parse_args(sys.argv[2:])
    found = _read(given.file)
    print(report.config_file(found), end="")
    columns = ("key of DeepSpeed", "value", "here", "settings, reason or remedy")
    print(render_table(columns, report.table_rows(found)), file=sys.stderr)
    print(report.summary(found), file=sys.stderr)
    for problem in found.problems():
        print(f"zjax: {problem}", file=sys.stderr)
    sys.exit(1 if found.problems() else 0)


def summarise_file(path: str) -> str:
    """How many keys of a file became what, and the command that lists them."""
    return f"{path}: {report.summary(_read(path))}; each key: zjax convert {path}"


def _read(path: str) -> Conversion:
    return convert(read_file(pathlib.Path(local_path("ds_config", path))))
