"""`mesh="auto"` on every way in, and what is done with what nobody has chosen."""

import ml_collections
import pytest
from absl import flags as absl_flags

from zjax.config import flags, load_config
from zjax.errors import ConfigError
from zjax.settings import schema
from zjax.settings.describe import describe_config
from zjax.sharding.mesh import mesh_sizes

OPEN = schema.Mesh(pipeline=0, sequence=0, tensor=0)


def test_every_way_in_gives_open_axes(tmp_path):
    python, gin = tmp_path / "auto.py", tmp_path / "auto.gin"
    python.write_text(
        "from zjax import config as zconfig\n"
        "def get_config():\n"
        "    config = zconfig.base()\n"
        "    config.mesh = 'auto'\n"
        "    return config\n"
    )
    gin.write_text("config.mesh = 'auto'\n")
    for source in (
        python,
        gin,
        {"mesh": "auto"},
        ml_collections.ConfigDict({"mesh": "auto"}),
        load_config({}, "mesh=auto"),
        load_config({}, mesh="auto"),
    ):
        assert load_config(source).mesh == OPEN


@pytest.mark.parametrize(
    ("changes", "mesh"),
    [
        (["--config.mesh=auto"], OPEN),
        (
            ["--config.mesh=auto", "--config.mesh.tensor=4"],
            schema.Mesh(pipeline=0, sequence=0, tensor=4),
        ),
        (["--config.mesh.tensor=4", "--config.mesh=auto"], OPEN),
        (["--gin=config.mesh='auto'"], OPEN),
        (["--config.mesh.tensor=0"], schema.Mesh(tensor=0)),
    ],
)
def test_command_line(changes, mesh):
    """Fails if a later flag for one axis drops the word before it."""
    values = absl_flags.FlagValues()
    flags.define_flags(["zjax", *changes], values)
    values(["zjax", *changes])
    assert flags.config_from_flags(values).mesh == mesh


def test_open_mesh_is_written_and_read_again(tmp_path):
    config = load_config({"mesh": "auto"})
    path = tmp_path / "again.gin"
    path.write_text(describe_config(config))
    assert load_config(path) == config


def test_another_word_is_refused():
    with pytest.raises(ConfigError) as error:
        load_config({"mesh": "fast", "zero": "auto"})
    mesh, zero = str(error.value).splitlines()
    assert mesh == (
        "mesh='fast' is a str; expected 'auto', or a mapping with any of pipeline, "
        "replica, data, expert, sequence, tensor, names, rules"
    )
    assert zero.startswith("zero='auto' is a str; expected a mapping with any of ")


def test_mesh_of_open_axes_cannot_be_laid_out():
    with pytest.raises(ConfigError) as error:
        mesh_sizes(OPEN, 8)
    assert str(error.value) == (
        "mesh='0x1x-1x1x0x0' does not fill 8 devices; choose pipeline, replica, data, "
        "expert, sequence, tensor whose product is 8"
    )
