"""Gin sets values, and nothing but values."""

import math
import os
import pathlib

import gin as google_gin
import pytest

from zjax.config import gin
from zjax.errors import ConfigError
from zjax.settings import schema

VALUES_ONLY = "set values only: config.section.name = value"
DEEP = "is nested too deep; nest fewer brackets, and fewer macros in macros"
SYNTAX = "write config.section.name = value, strings in quotes"


@pytest.mark.parametrize(
    ("binding", "path", "value"),
    [
        ("config.seed=3", "seed", 3),
        ("config.zero.stage=3", "zero.stage", 3),
        ("config.directory='a'", "directory", "a"),
        ("config.optimizer.rule.eps=1", "optimizer.rule.eps", 1.0),
        ("config.mesh.data=-1", "mesh.data", -1),
        ("config.optimizer.clip_norm=%inf", "optimizer.clip_norm", math.inf),
        ("config.optimizer.clip_norm=1e999", "optimizer.clip_norm", math.inf),
        ("config.observe.sinks=('csv',)", "observe.sinks", ("csv",)),
        ("config.observe.sinks=['csv', 'jsonl']", "observe.sinks", ("csv", "jsonl")),
        (
            "config.optimizer.groups=({'pattern': 'x'},)",
            "optimizer.groups",
            (schema.ParamGroup(pattern="x"),),
        ),
        ("config.zero:\n  stage = 3\n", "zero.stage", 3),
    ],
)
def test_binding(binding, path, value):
    built = gin.from_gin(bindings=[binding])
    for name in path.split("."):
        built = getattr(built, name)
    assert built == value


def test_last_one_wins(tmp_path):
    first, second = tmp_path / "a.gin", tmp_path / "b.gin"
    first.write_text("config.seed = 1\nconfig.num_steps = 1\nconfig.zero.stage = 0\n")
    second.write_text("config.seed = 2\nconfig.num_steps = 2\n")
    config = gin.from_gin([str(first), str(second)], ["config.seed = 3"])
    assert (config.seed, config.num_steps, config.zero.stage) == (3, 2, 0)


def test_included_file_lies_beside_the_including_one(tmp_path):
    (tmp_path / "base.gin").write_text("config.seed = 1\nconfig.num_steps = 1\n")
    (tmp_path / "a.gin").write_text("include 'base.gin'\nconfig.seed = 2\n")
    config = gin.from_gin([str(tmp_path / "a.gin")])
    assert (config.seed, config.num_steps) == (2, 1)


def test_macro_is_resolved_after_everything_is_read(tmp_path):
    path = tmp_path / "a.gin"
    path.write_text("width = 8\nconfig.model.embed_size = %width\n")
    assert gin.from_gin([str(path)], ["width = 16"]).model.embed_size == 16


def test_macro_inside_a_container():
    bindings = ["p = 'x'", "config.optimizer.groups = [{'pattern': %p}]"]
    config = gin.from_gin(bindings=bindings)
    assert config.optimizer.groups == (schema.ParamGroup(pattern="x"),)


def test_the_registry_of_gin_is_left_alone():
    gin.from_gin(bindings=["config.seed = 3"])
    assert google_gin.config_str() == ""
    with pytest.raises(ValueError, match="config"):
        google_gin.parse_config("config.seed = 3")


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (
            ["config.zero.stagee = 1", "config.seed = 'a'"],
            "zero.stagee=1 is not a setting; did you mean zero.stage?\n"
            "seed='a' is a str; expected int",
        ),
        (
            ["zero.stage = 3"],
            "zero.stage=3 is not a setting; did you mean config.zero.stage?",
        ),
        (
            ["num_steps = 3"],
            "num_steps=3 is an unused macro; write config.num_steps if it is a setting",
        ),
        (["config.seed = %x"], "config.seed='%x' is not a macro; define it: x = ..."),
        (
            ["x = %y", "y = %x", "config.seed = %x"],
            "config.seed='%x' is a macro that reaches itself; write a value",
        ),
        (
            [f"x{i + 1} = %x{i}" for i in range(2_000)] + ["config.seed = %x2000"],
            f"gin='x1 = %x0' {DEEP}",
        ),
        (
            ["config.seed = %x30", "x0 = 1"]
            + [f"x{i + 1} = [%x{i}, %x{i}]" for i in range(30)],
            "config.seed='...' expands to more than 10,000 values by macros; "
            "write the values out",
        ),
        (
            ["config.seed = @print()"],
            f"config.seed='@print()' refers to code; {VALUES_ONLY}",
        ),
        (
            ["train/config.seed = 1"],
            f"train/config.seed=1 has a Gin scope; {VALUES_ONLY}",
        ),
        (["import os"], f"import='os' would run code; {VALUES_ONLY}"),
        (
            ["config.directory = runs"],
            "gin='config.directory = runs' is not Gin: "
            f"a string lacks its quotes, or a macro its %; {SYNTAX}",
        ),
        (
            ["config.seed"],
            "gin='config.seed' is not Gin: "
            f"Couldn't parse statement, expected ':' or '='; {SYNTAX}",
        ),
        (
            ["config.seed = (1,", "config.seed = 1 2"],
            f"gin='config.seed = (1,' is not Gin: {{bracket}}; {SYNTAX}\n"
            f"gin='config.seed = 1 2' is not Gin: Expected newline; {SYNTAX}",
        ),
    ],
)
def test_bad_binding(bindings, message):
    with pytest.raises(ConfigError) as error:
        gin.from_gin(bindings=bindings)
    # The words for an open bracket are Python's own and differ between versions.
    bracket = str(error.value).partition("is not Gin: ")[2].partition(";")[0]
    assert str(error.value) == message.replace("{bracket}", bracket)


def test_syntax_error_names_the_line(tmp_path):
    path = tmp_path / "a.gin"
    path.write_text("config.seed = 1\nconfig.num_steps = = 2\nconfig.seed = 3\n")
    with pytest.raises(ConfigError) as error:
        gin.from_gin([str(path)])
    assert str(error.value) == (
        f"{path}:2='config.num_steps = = 2' is not Gin: Unable to parse value; {SYNTAX}"
    )


def test_missing_file():
    with pytest.raises(ConfigError) as error:
        gin.from_gin(["nowhere.gin"])
    assert str(error.value) == (
        "gin_file='nowhere.gin' cannot be read: No such file or directory; "
        "give the path of a Gin file"
    )


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "a.gin"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError) as error:
        gin.from_gin([str(path)])
    assert str(error.value) == (
        f"gin_file={str(path)!r} cannot be read: it is not UTF-8 text; "
        "give the path of a Gin file"
    )


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("", "include='30.gin' is file 101; include fewer"),
        (
            "include '29.gin'",
            "include='29.gin' includes itself: 29.gin -> 30.gin -> 29.gin; remove one",
        ),
    ],
)
def test_includes_that_multiply_or_go_in_a_circle(last, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(30):
        pathlib.Path(f"{i}.gin").write_text(f"include '{i + 1}.gin'\n" * 2)
    pathlib.Path("30.gin").write_text(last)
    with pytest.raises(ConfigError) as error:
        gin.from_gin(["29.gin" if last else "0.gin"])
    assert str(error.value).splitlines()[0] == message


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_what_never_ends_is_not_read(kind, tmp_path):
    path = tmp_path / "pipe" if kind == "pipe" else kind
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be read: it is not a regular file"):
        gin.from_gin([str(path)])
