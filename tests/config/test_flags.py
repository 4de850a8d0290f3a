"""The command line describes one config, by one front end."""

import math
import pathlib
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from zjax import config as zconfig
from zjax.config import flags
from zjax.errors import ConfigError

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.py"


def parse(*arguments):
    values = absl_flags.FlagValues()
    argv = ["zjax", *map(str, arguments)]
    flags.define_flags(argv, values)
    values(argv)
    return flags.config_from_flags(values)


@pytest.mark.parametrize("suffix", [".py", ".gin"])
def test_file_alone(suffix):
    path = QUICKSTART.with_suffix(suffix)
    assert parse(f"--config={path}") == zconfig.load_config(path)


def test_changes():
    config = parse(
        f"--config={QUICKSTART}",
        "--config.zero.stage=3",
        "--config.optimizer.clip_norm",
        "inf",
        "-config.directory=runs/x",
        "--config.num_steps=1",
        "--config.num_steps=5",
    )
    assert config.zero.stage == 3
    assert config.optimizer.clip_norm == math.inf
    assert config.directory == "runs/x"
    assert config.num_steps == 5
    assert config.model == zconfig.load_config(QUICKSTART).model


def test_changes_without_a_file_start_from_the_defaults():
    assert parse("--config.seed=5") == zconfig.Config(seed=5)


def test_changes_from_a_flagfile(tmp_path):
    path = tmp_path / "flags"
    path.write_text("--config.seed=5\n")
    assert parse(f"--flagfile={path}") == zconfig.Config(seed=5)


def test_gin_file_and_bindings_equal_config_and_changes():
    gin = parse(
        f"--gin_file={QUICKSTART.with_suffix('.gin')}",
        "--gin=config.zero.stage=3",
        "--gin=config.mesh.tensor=4",
    )
    config = parse(
        f"--config={QUICKSTART}", "--config.zero.stage=3", "--config.mesh.tensor=4"
    )
    assert gin == config


def test_binding_without_a_file():
    assert parse("--gin=config.seed=5") == zconfig.Config(seed=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "config='' is not given; use --config=quickstart, or --gin_file"),
        (
            ["--config=a.py", "--gin_file=b.gin"],
            "config='a.py' conflicts with --gin_file=b.gin; "
            "use either --config or Gin, not both",
        ),
        (
            ["--config.seed=1", "--gin=config.seed=2"],
            "config='config.seed=1' conflicts with --gin=config.seed=2; "
            "use either --config or Gin, not both",
        ),
        (
            ["--config.zero.stagee=1", "--config.mesh.tensor=x", "--config.observe=1"],
            "mesh.tensor='x' is a str; expected int\n"
            "observe=1 is an int; expected a mapping with any of sinks, "
            "project, log_every_steps, plot, profile, peak_tflops\n"
            "zero.stagee=1 is not a setting; did you mean zero.stage?",
        ),
        (
            ["--config=x.json"],
            "config='x.json' does not exist; give the path of a file",
        ),
    ],
)
def test_bad_command_line(arguments, message):
    with pytest.raises(ConfigError) as error:
        parse(*arguments)
    assert "\n".join(sorted(str(error.value).splitlines())) == message


def test_a_ds_config_wins_over_the_config_and_changes_win_over_both(tmp_path):
    theirs = tmp_path / "ds_config.json"
    theirs.write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 3}}')
    ours = tmp_path / "ours.gin"
    memory = "config.zero.offload.parameter_memory = 'nvme'"
    ours.write_text(f"config.zero.stage = 1\nconfig.seed = 7\n{memory}\n")
    words = [f"--config={ours}", f"--ds_config={theirs}", "--config.num_steps=9"]
    found = parse(*words, "--config.global_batch_size=8")
    assert (found.zero.stage, found.seed, found.num_steps) == (3, 7, 9)
    assert found.global_batch_size == 8
    assert found.zero.offload is None
    assert parse(f"--config={theirs}").global_batch_size == 64


def test_importing_defines_nothing_and_defining_twice_is_safe():
    code = """
import sys
from absl import flags as absl_flags
from zjax.config import flags
assert "config" not in absl_flags.FLAGS
flags.define_flags()
flags.define_flags()
absl_flags.FLAGS(sys.argv)
import jax
jax.config.update("jax_num_cpu_devices", 3)  # fails once a backend has started
print(flags.config_from_flags().seed)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "--config.seed=9"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "9\n"


def test_a_file_of_flags_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="--flagfile='given' cannot be read"):
        flags.define_flags(["zjax", "--flagfile=/nope"], absl_flags.FlagValues())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--kind=c", "--kind='c' is not a choice; use one of a, b"),
        ("--size=a: b", "--size='a: b' is not a non-negative integer; use one"),
        ("--size=-1", "--size='-1' is not a non-negative integer; use one"),
        ("--rate=x", "--rate='x' is not a number; use one"),
        ("--is_fast=maybe", "--is_fast='maybe' is not a bool; use true or false"),
        ("--sise=3", "--sise='3' is not a flag; did you mean --size?"),
        ("--nothing_like_it", "--nothing_like_it='' is not a flag; see zjax help"),
        ("--kind", "--kind='' has no value; write --kind=VALUE"),
    ],
)
def test_a_flag_that_cannot_be_read_is_named_with_what_it_takes(word, message):
    """Fails if absl's text reaches the user."""
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_enum("kind", "", ["", "a", "b"], "", flag_values=values)
    absl_flags.DEFINE_integer("size", 1, "", flag_values=values, lower_bound=0)
    absl_flags.DEFINE_float("rate", 1, "", flag_values=values)
    absl_flags.DEFINE_boolean("is_fast", False, "", flag_values=values)
    with pytest.raises(ConfigError) as error:
        flags.parse(["zjax", word], values)
    assert str(error.value) == message


def test_words_that_are_no_flags_are_left():
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_integer("size", 1, "", flag_values=values)
    assert flags.parse(["zjax", "plan", "--size=2"], values) == ["zjax", "plan"]
    assert values["size"].value == 2
