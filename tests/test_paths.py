"""Paths of users: `~` is a home wherever one may be given, and buckets are refused."""

import operator
import pathlib

import pytest

from tests.support.refusals import config_error
from zjax.checkpoint.start import load_weights
from zjax.config import base, load_config
from zjax.config.gin import from_gin
from zjax.data.prepare import prepare
from zjax.data.tokenizer import load_tokenizer
from zjax.errors import ConfigError, ZjaxError
from zjax.files import CHECKED_LATER, OPTIONAL, SETTINGS, local_path
from zjax.settings import schema
from zjax.settings.choices import names
from zjax.settings.describe import setting_paths
from zjax.settings.mappings import to_mapping

CHOICES = {"rl.critic.init_from": ("rl.critic=own",)}
"""Settings under which a path is read."""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of its own for each test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_setting_that_is_a_path_is_left_out():
    """Fails where a new setting has the name of one."""
    words = ("path", "directory", "_file", "folder", "init_from", "teacher", "index")
    words += (".prompts", "evaluation_prompts")
    of_metrics = (f"curriculum.metrics.{x}" for x in names(schema.CurriculumMetric))
    found = {x for x in (*setting_paths(), *of_metrics) if x.endswith(words)}
    listed = {"zero.offload.nvme_paths", "rl.rewards.directory"}
    assert found | listed == {*SETTINGS}


def test_a_home_is_expanded_in_the_directory_of_a_reward(home):
    rewards = ({"kind": "run", "directory": "~/a"}, {"function": "a:b"})
    found = load_config({"rl": {"rewards": rewards}})
    assert found.rl.rewards[0].directory == f"{home}/a"
    assert load_config(found) == found


def test_a_home_is_expanded_in_the_index_of_a_metric(home):
    metrics = ({"index": "~/a"}, {"index": "b"})
    found = load_config({"curriculum": {"metrics": metrics}}).curriculum.metrics
    assert [metric.index for metric in found] == [f"{home}/a", "b"]
    with config_error(
        "curriculum.metrics[0].index='gs://b/a' is not a path of a file system; give "
        "one on a disk, or where the bucket is mounted"
    ):
        load_config({"curriculum": {"metrics": ({"index": "gs://b/a"},)}})


@pytest.mark.parametrize(
    "setting", [name for name in SETTINGS if name not in CHECKED_LATER]
)
def test_a_home_is_expanded_in_every_setting(setting, home):
    many = setting == "zero.offload.nvme_paths"
    value = ("~/a",) if many else "~/a"
    config = load_config({}, *CHOICES.get(setting, ()), {setting: value})
    found = operator.attrgetter(setting)(config)
    assert found == ((f"{home}/a",) if many else f"{home}/a")


@pytest.mark.parametrize(
    "setting", [name for name in SETTINGS if name not in CHECKED_LATER]
)
def test_variables_are_expanded_in_every_setting(setting, monkeypatch):
    monkeypatch.setenv("PLACE", "/p")
    given = f"{setting}=$PLACE/${{PLACE}}_$1"
    config = load_config({}, *CHOICES.get(setting, ()), given)
    found = operator.attrgetter(setting)(config)
    wanted = "/p//p_$1"
    assert found == ((wanted,) if setting == "zero.offload.nvme_paths" else wanted)
    assert load_config(config) == config


def test_a_variable_may_begin_with_a_home_and_holds_no_url(home, monkeypatch):
    monkeypatch.setenv("PLACE", "~/a")
    assert local_path("output", "$PLACE/b") == f"{home}/a/b"
    monkeypatch.setenv("PLACE", "gs://bucket")
    with pytest.raises(ConfigError, match="is not a path of a file system"):
        local_path("output", "${PLACE}/b")


def test_variables_that_say_nothing_are_refused_by_name(monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("OTHER", "$HOME/x")
    with pytest.raises(ConfigError) as error:
        load_config(
            {},
            "directory=$NOWHERE/a",
            "data.path=${EMPTY}/$OTHER",
            "zero.offload.nvme_paths=${}",
        )
    assert set(str(error.value).splitlines()) == {
        "directory='$NOWHERE/a' needs $NOWHERE, which is not set; set it, or write the "
        "path",
        "data.path='${EMPTY}/$OTHER' needs $EMPTY, which is empty; set it, or write "
        "the path",
        "data.path='${EMPTY}/$OTHER' needs $OTHER, whose value '$HOME/x' names another "
        "variable; write the path in it",
        "zero.offload.nvme_paths[0]='${}' needs $, which is not set; set it, or write "
        "the path",
    }


@pytest.mark.parametrize("name", ["config", "gin_file", "input", "output", "weights"])
def test_arguments_with_an_unset_variable_are_refused(name, home, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(ZjaxError, match=r"needs \$NOWHERE, which is not set"):
        arguments("$NOWHERE/a")[name]()
    assert [path.name for path in home.iterdir()] == ["text.txt"]


def test_a_path_with_a_scheme_is_refused_by_name_with_all_others():
    with pytest.raises(ConfigError) as error:
        load_config({"directory": "gs://b/run", "data": {"path": "s3://b/d"}, "x": 1})
    remedy = "give one on a disk, or where the bucket is mounted"
    assert str(error.value).splitlines()[:2] == [
        f"directory='gs://b/run' is not a path of a file system; {remedy}",
        f"data.path='s3://b/d' is not a path of a file system; {remedy}",
    ]
    assert "x=1 is not a setting" in str(error.value)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "is empty; give a path; . is this directory"),
        ("~nobody-of-this-name/a", "begins with ~nobody-of-this-name, which names no"),
        ("a\0b", "holds a NUL"),
        ("x" * 256, "is too long"),
        ("x/" * 2_001, "is too long"),
        ("\ud800", "holds half a character"),
        ("file:///tmp/a", "is not a path of a file system"),
        ("gs:/b/run", "is not a path of a file system"),
        (" s3://b/run", "is not a path of a file system"),
    ],
)
def test_what_cannot_be_opened_is_refused(path, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config({"directory": path})


@pytest.mark.parametrize("url", ["gs://b/run", "s3://b/run"])
def test_a_url_stays_one_when_pathlib_drops_a_slash(url):
    given = pathlib.Path(url)
    with config_error(
        f"directory='{given}' is not a path of a file system; give one on a disk, or "
        "where the bucket is mounted"
    ):
        local_path("directory", given)


@pytest.mark.parametrize("path", ["a", "./~", "a:b", "c:/d", "x/gs://y"])
def test_plain_paths_stay_as_they_are(path):
    assert local_path("directory", path) == path


def test_an_empty_path_is_none_where_there_need_be_none_and_else_refused():
    """Fails if a run with the directory '' works in the one that it was started in."""
    config = load_config({setting: "" for setting in OPTIONAL})
    assert (config.data.path, config.checkpoint.init_from) == ("", "")
    assert {*OPTIONAL} < {*SETTINGS}
    with pytest.raises(ConfigError) as error:
        load_config({"directory": "", "zero.offload.nvme_paths": ("a", "")})
    remedy = "is empty; give a path; . is this directory"
    assert {*str(error.value).splitlines()} == {
        f"directory='' {remedy}",
        f"zero.offload.nvme_paths[1]='' {remedy}",
    }


@pytest.mark.parametrize("name", ["gin_file", "input", "load_tokenizer", "weights"])
def test_empty_arguments_are_refused(name):
    with pytest.raises(ZjaxError, match="='' is empty; give a path"):
        arguments("")[name]()


def test_files_of_settings_may_lie_at_home(home):
    (home / "a.gin").write_text("config.seed = 3\nconfig.directory = '~/b'")
    for config in (load_config("~/a.gin"), from_gin(["~/a.gin"])):
        assert (config.seed, config.directory) == (3, f"{home}/b")


def test_defaults_and_loaded_configs_are_loaded_again_unchanged():
    config = load_config({"directory": "~/a"})
    assert load_config(config) == config
    assert load_config(base()) == load_config(to_mapping(schema.Config()))


def arguments(path):
    """Every call, beside settings, that takes a path of the user."""
    text = pathlib.Path("text.txt")
    text.write_text("one\n")
    return {
        "config": lambda: load_config(f"{path}.gin"),
        "gin_file": lambda: from_gin([path]),
        "input": lambda: prepare([path], "out"),
        "output": lambda: prepare([text], path),
        "tokenizer": lambda: prepare([text], "out", tokenizer=f"{path}.json"),
        "load_tokenizer": lambda: load_tokenizer(path),
        "weights": lambda: load_weights(path, {}),
    }


@pytest.mark.parametrize(
    "name",
    ["config", "gin_file", "input", "output", "tokenizer", "load_tokenizer", "weights"],
)
def test_arguments_with_a_scheme_are_refused(name, home):
    with pytest.raises(ZjaxError, match="is not a path of a file system"):
        arguments("gs://bucket/a")[name]()
    assert not (home / "gs:").exists()


def test_prepared_data_lies_at_home(home):
    (home / "in").mkdir()
    (home / "in" / "a.txt").write_text("one\n")
    prepare(["~/in"], "~/out", validation_fraction=0.0)
    assert (home / "out" / "meta.json").is_file()
