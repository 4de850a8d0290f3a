"""Settings that follow from others, and loops over layers that nobody asked for."""

import dataclasses
import json
import operator
import pickle

import jax
import pytest

from tests.support import language
from zjax.config import load_config
from zjax.models.build import make_model
from zjax.run.resume import changes
from zjax.settings import derived, mappings, schema
from zjax.settings.describe import describe_config
from zjax.settings.layers import layers_per_scan
from zjax.settings.schema import Config, Data, PinnedHost, Precision, Zero


def value(config, path):
    return operator.attrgetter(path)(config)


def prepared(directory, content):
    (directory / "meta.json").write_text(content)
    return {"data.source": "tokens", "data.path": str(directory)}


VALUES = [
    ({"model.max_length": 64}, "data.length", 64),
    ({"model.num_heads": 6}, "model.num_kv_heads", 6),
    ({"model.num_heads": 6}, "model.head_size", 128),
    ({"model.embed_size": 64}, "model.mlp_size", 256),
    ({"model.embed_size": 96, "model.activation": "swiglu"}, "model.mlp_size", 256),
    ({"model.embed_size": 4096, "model.activation": "swiglu"}, "model.mlp_size", 11008),
    ({}, "model.vocab_size", 257),
    ({"data.source": "synthetic"}, "model.vocab_size", 50_257),
    ({"data.source": "tokens", "data.path": "/none"}, "model.vocab_size", 50_257),
]


@pytest.mark.parametrize(("settings", "path", "expected"), VALUES)
def test_a_size_that_is_not_set_follows_from_others(settings, path, expected):
    found = value(load_config(settings), path)
    assert (found, derived.is_derived(found)) == (expected, True)


@pytest.mark.parametrize(("settings", "path", "expected"), VALUES)
def test_a_size_that_is_set_stays(settings, path, expected):
    found = value(load_config(settings | {path: 12}), path)
    assert (found, derived.is_derived(found)) == (12, False)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"tokenizer": {"vocab_size": 300}}', 300),
        ('{"tokenizer": "bytes", "vocab_size": 300}', 300),
        ('{"vocab_size": "many"}', 50_257),
        ("[]", 50_257),
        ("{", 50_257),
    ],
)
def test_the_vocabulary_is_that_of_prepared_data(content, expected, tmp_path):
    given = load_config(prepared(tmp_path, content))
    assert given.model.vocab_size == expected
    resized = dataclasses.replace(given, model=dataclasses.replace(given.model))
    assert resized.model.vocab_size == expected
    assert load_config(given, "data.source=standard_library").model.vocab_size == 257


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("device", "device", "device")),
        ({"memory": "pinned_host"}, ("pinned_host", "pinned_host", "device")),
        ({"memory": "nvme"}, ("nvme", "pinned_host", "pinned_host")),
        ({"memory": "auto"}, ("auto", "device", "device")),
        ({"optimizer_memory": "nvme"}, ("nvme", "device", "device")),
        (
            {"memory": "nvme", "gradient_memory": "nvme", "parameter_memory": "device"},
            ("nvme", "nvme", "device"),
        ),
    ],
)
def test_old_names_of_memories_are_read(settings, expected):
    """Fails if a place changes where one name stood for several memories."""
    dotted = {f"zero.{name}": value for name, value in settings.items()}
    for zero in (load_config({"zero": settings}).zero, load_config(dotted).zero):
        place = zero.placement
        found = zero.optimizer_memory, place.gradient_memory, place.parameter_memory
        assert found == expected


def test_a_derived_setting_follows_changes_of_a_config_and_a_set_one_does_not():
    config = load_config({"model": {"num_heads": 4, "mlp_size": 64}})
    for other in (
        load_config(config, "model.num_heads=2", "model.embed_size=32"),
        dataclasses.replace(
            config, model=dataclasses.replace(config.model, num_heads=2, embed_size=32)
        ),
        pickle.loads(pickle.dumps(load_config(config, "model.num_heads=2"))),
    ):
        assert (other.model.num_kv_heads, other.model.mlp_size) == (2, 64)
        assert derived.is_derived(other.model.num_kv_heads)


def test_a_config_file_that_sets_a_width_sets_what_follows():
    made = mappings.base()
    made.model.embed_size = 32
    assert load_config(made).model.mlp_size == 128


def test_a_derived_number_in_a_tuple_of_the_user_counts_as_set():
    """Fails if it is reset to 0, which layers would be cut to."""
    length = schema.Config().data.length
    pacing = {"kind": "discrete", "values": [128, length], "last_steps": [10]}
    config = load_config({"random_ltd": {"kind": "span", "pacing": pacing}})
    assert config.random_ltd.pacing.values == (128, length)


def test_defaults_are_not_changed_by_what_is_derived():
    """Fails if a section that configs share is filled in."""
    load_config({"model.max_length": 64, "zero.offload": "nvme"})
    assert (schema.Config().data.length, schema.Data().length) == (1_024, 0)
    assert schema.Config().zero.offload is None


def test_a_text_says_what_is_derived():
    lines = describe_config(load_config({"model.num_heads": 4})).splitlines()
    assert "config.model.num_heads = 4" in lines
    assert "config.model.num_kv_heads = 4  # derived" in lines


def test_a_saved_config_states_all_values_and_goes_on_unchanged():
    """Fails if a run is told of a change where the same values were set before."""
    config = load_config({"zero.offload": "pinned_host", "model.num_heads": 4})
    saved = json.loads(json.dumps(mappings.to_mapping(config)))
    again = load_config(saved)
    assert again == config
    assert "# derived" not in describe_config(again)
    assert [d.setting for d in changes({"config": saved}, config)] == ["jax"]
    fewer = load_config(config, "model.num_heads=2")
    found = [d.setting for d in changes({"config": saved}, fewer)]
    sizes = ("num_heads", "num_kv_heads", "head_size", "query_scale_size")
    assert found == [*(f"model.{name}" for name in sizes), "jax"]


def test_a_derived_value_that_is_given_is_set():
    """Fails if a value read from one setting and given to another counts as not set."""
    config = load_config({"model.max_length": 64})
    length = load_config(config, {"model.max_length": config.data.length})
    assert (length.model.max_length, length.data.length) == (64, 64)


def test_a_default_that_gives_way_is_known_from_the_same_value_that_is_set():
    config = load_config({})
    assert derived.is_offered(load_config(config, "seed=1").optimizer.clip_norm)
    assert derived.is_offered(load_config(mappings.base()).optimizer.clip_norm)
    for given in ({"optimizer.clip_norm": 1.0}, ["optimizer.clip_norm=1.0"]):
        found = load_config(config, *given if isinstance(given, list) else [given])
        assert not derived.is_offered(found.optimizer.clip_norm)


HALF = Precision(compute_dtype="bfloat16")


def make_config(**settings):
    return Config(model=language.GPT, data=Data(length=8), **settings)


def test_deterministic_models_hold_one_kernel_of_each_kind():
    config = make_config(precision=HALF, deterministic=True)
    model = make_model(config)
    assert not model.takes_layers_apart
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    batch = {
        name: jax.ShapeDtypeStruct((2, 8), "int32") for name in ("tokens", "targets")
    }
    program = jax.make_jaxpr(model.loss)(params, state, batch, None)
    lengths = [
        each.params["length"] for each in program.eqns if each.primitive.name == "scan"
    ]
    assert config.model.num_layers in lengths


def test_loops_within_layers_ask_for_a_loop_over_them():
    """Else each layer keeps a copy of its matrices for its own loop."""
    model = dataclasses.replace(language.GPT, remat="full", mlp_chunk_tokens=4)
    config = dataclasses.replace(make_config(), model=model)
    assert layers_per_scan(config) == 1
    stride = dataclasses.replace(model, layers_per_scan=2)
    assert layers_per_scan(dataclasses.replace(config, model=stride)) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"deterministic": True, "precision": Precision(compute_dtype="float32")},
        {"deterministic": True, "zero": Zero(offload=PinnedHost())},
    ],
    ids=["not-deterministic", "float32", "blocks-apart"],
)
def test_others_keep_their_layers_side_by_side(settings):
    assert layers_per_scan(make_config(**settings)) == 0
