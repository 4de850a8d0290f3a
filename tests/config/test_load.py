"""Every source of settings gives the same Config, changed by overrides."""

import inspect
import math

import ml_collections
import pytest

from zjax import config as zconfig
from zjax.errors import ConfigError
from zjax.settings import schema

PYTHON = """
from zjax import config as zconfig

def get_config():
    config = zconfig.base()
    config.num_steps = 7
    config.zero.stage = 3
    return config
"""
EXPECTED = schema.Config(num_steps=7, zero=schema.Zero(stage=3))


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_python_file(write):
    assert zconfig.load_config(write("c.py", PYTHON)) == EXPECTED


def test_python_file_may_give_a_dict(write):
    text = "def get_config(): return {'num_steps': 7, 'zero': {'stage': 3}}"
    assert zconfig.load_config(str(write("c.py", text))) == EXPECTED


def test_gin_file(write):
    path = write("c.gin", "config.num_steps = 7\nconfig.zero.stage = 3\n")
    assert zconfig.load_config(path) == EXPECTED


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(EXPECTED, id="config"),
        pytest.param({"num_steps": 7, "zero": {"stage": 3}}, id="dict"),
        pytest.param({"num_steps": 7, "zero.stage": 3}, id="dotted-dict"),
        pytest.param({"num_steps": 7, "zero": schema.Zero(stage=3)}, id="section"),
        pytest.param(
            ml_collections.ConfigDict({"num_steps": 7, "zero": {"stage": 3}}),
            id="config-dict",
        ),
    ],
)
def test_python_value(source):
    assert zconfig.load_config(source) == EXPECTED


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("zero.stage=3", "zero.stage", 3),
        ("config.zero.stage = 3", "zero.stage", 3),
        ("directory=runs/a=b", "directory", "runs/a=b"),
        ("directory='runs/a'", "directory", "runs/a"),
        ("directory=7", "directory", "7"),
        ("data.path=None", "data.path", "None"),
        ("optimizer.rule=lion", "optimizer.rule", schema.Lion()),
        ("optimizer.rule.eps=1e-6", "optimizer.rule.eps", 1e-6),
        ("optimizer.clip_norm=inf", "optimizer.clip_norm", math.inf),
        ("observe.plot=False", "observe.plot", False),
        ("observe.sinks=('csv',)", "observe.sinks", ("csv",)),
        ("observe.sinks=console, csv", "observe.sinks", ("console", "csv")),
        ("observe.sinks=csv", "observe.sinks", ("csv",)),
        ("observe.sinks=", "observe.sinks", ()),
        ("zero.offload.nvme_paths=/a,/b", "zero.offload.nvme_paths", ("/a", "/b")),
        (
            "zero.offload.nvme_paths='/a,b','/c'",
            "zero.offload.nvme_paths",
            ("/a,b", "/c"),
        ),
        ("zero.offload.nvme_paths=1,2", "zero.offload.nvme_paths", ("1", "2")),
        (
            "optimizer.groups=[{'pattern': 'x'}]",
            "optimizer.groups",
            (schema.ParamGroup(pattern="x"),),
        ),
        ({"zero": {"stage": 3}}, "zero.stage", 3),
        ({"zero.stage": 3}, "zero.stage", 3),
    ],
)
def test_override(override, path, value):
    built = zconfig.load_config({"zero": {"stage": 2}}, override)
    for name in path.split("."):
        built = getattr(built, name)
    assert built == value


def test_last_override_wins_and_keywords_win_over_all():
    config = zconfig.load_config({"seed": 1}, "seed=2", {"num_steps": 5}, "seed=3")
    assert (config.seed, config.num_steps) == (3, 5)
    config = zconfig.load_config(config, "zero.stage=2", seed=4, zero={"stage": 3})
    assert (config.seed, config.zero.stage, config.num_steps) == (4, 3, 5)


def test_override_replaces_one_setting_of_a_given_section():
    source = {"zero": schema.Zero(stage=3, min_shard_elements=1)}
    zero = zconfig.load_config(source, "zero.stage=2").zero
    assert zero == schema.Zero(stage=2, min_shard_elements=1)


def test_none_drops_the_settings_of_a_section():
    assert zconfig.load_config({"lora.rank": 3}, "lora=none").lora is None


def test_source_is_left_as_it_was():
    source = {"zero": {"stage": 1}}
    zconfig.load_config(source, "zero.stage=3")
    assert source == {"zero": {"stage": 1}}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "", "is not a config file; use .py, .gin, or a ds_config.json"),
        (
            "c.py",
            "",
            "has no get_config(); "
            "define it and return zjax.config.base() with your changes",
        ),
        (
            "c.py",
            "def get_config(): pass",
            "gives a NoneType; return zjax.config.base() with your changes",
        ),
        (
            "c.py",
            PYTHON.replace("config.zero.stage", "config.zeroo.stage"),
            "fails on line 7 with AttributeError ('zeroo' "
            'Did you mean "zero" instead of "zeroo"?); correct it there',
        ),
        (
            "c.py",
            PYTHON.replace("= 7", "= = 7"),
            "fails on line 6 with SyntaxError (invalid syntax); correct it there",
        ),
        (
            "c.py",
            "import json\n\nsteps = json.loads('x')\n",
            "fails on line 3 with JSONDecodeError (Expecting value: line 1 column 1 "
            "(char 0)); correct it there",
        ),
        (
            "c.py",
            "def get_config():\n    return {}['a']\n",
            "fails on line 2 with KeyError (a); correct it there",
        ),
    ],
)
def test_unreadable_file(write, name, text, message):
    path = write(name, text)
    with pytest.raises(ConfigError) as error:
        zconfig.load_config(path)
    assert str(error.value) == f"config={str(path)!r} {message}"


def test_refusal_inside_a_python_file_is_not_wrapped(write):
    text = "from zjax import config\nconfig.load_config({'a': 1})\n"
    with pytest.raises(ConfigError) as error:
        zconfig.load_config(write("c.py", text))
    assert str(error.value).startswith("a=1 is not a setting; ")


def test_keys_of_deepspeed_are_given_as_a_file():
    with pytest.raises(ConfigError) as error:
        zconfig.load_config({"train_batch_size": 8, "fp16": {}, "optimizer": {}})
    assert str(error.value) == (
        "config='dict' has keys of DeepSpeed: train_batch_size, fp16; "
        "write them to a ds_config.json, and give its path"
    )


@pytest.mark.parametrize("source", [None, 3], ids=["nothing", "number"])
def test_source_that_holds_no_settings(source):
    """Behind the annotations, which users do not run."""
    with pytest.raises(ConfigError) as error:
        inspect.unwrap(zconfig.load_config)(source)
    assert str(error.value) == (
        f"config={source} is a {type(source).__name__}, which holds no settings; "
        "give a .py or .gin file, a dict, a ConfigDict or a Config"
    )


def test_missing_file_names_its_neighbour(write):
    path = write("quickstart.py", PYTHON)
    wrong = path.with_name("quikstart.py")
    with pytest.raises(ConfigError) as error:
        zconfig.load_config(wrong)
    problem = f"config={str(wrong)!r} does not exist; did you mean {path}?"
    assert str(error.value) == problem


def test_missing_folder():
    with pytest.raises(ConfigError) as error:
        zconfig.load_config("nowhere/c.gin")
    problem = "config='nowhere/c.gin' does not exist; give the path of a file"
    assert str(error.value) == problem


def test_a_folder_of_the_name_of_a_file_is_called_what_it_is(tmp_path):
    (tmp_path / "a.gin").mkdir()
    with pytest.raises(ConfigError) as error:
        zconfig.load_config(tmp_path / "a.gin")
    assert f"config='{tmp_path}/a.gin' is a directory; " in str(error.value)


@pytest.mark.parametrize("text", ["true", "True"])
def test_bools_are_read_as_json_and_python_write_them(text):
    assert zconfig.load_config({}, f"deterministic={text}").deterministic is True


def test_settings_nested_without_end_are_refused():
    values = {}
    values["zero"] = values
    with pytest.raises(ConfigError, match="is nested too deep"):
        zconfig.load_config(values)
