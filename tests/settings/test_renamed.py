"""Old names of one mapping are translated together; later changes win over them."""

import pytest

from zjax import config as zconfig
from zjax.config import gin, load
from zjax.errors import ConfigError
from zjax.settings import convert, mappings, renamed, schema

NO_ROUNDS = "without communication.local_steps; leave it out, or set \
communication.local_steps"
NO_OFFLOAD = "without zero.offload; leave it out, or set zero.offload"
NO_WINDOW = "without model.window; leave it out, or set model.window"
TOO = "which is set, too; leave it out"


def outcome(source, *overrides):
    """Text of the config, or of the refusal."""
    try:
        return f"{mappings.to_mapping(zconfig.load_config(source, *overrides))}"
    except ConfigError as error:
        return f"{error}"


REFUSED = [
    # A setting of a section that is off, and the section with the old switch.
    ("communication.outer_learning_rate=0.5", f"has no effect {NO_ROUNDS}"),
    ("communication.num_local_steps=0 communication.delay=64", NO_ROUNDS),
    ("zero.parameter_memory=pinned_host", f"has no effect {NO_OFFLOAD}"),
    ("zero.optimizer_memory=device zero.parameter_memory=pinned_host", NO_OFFLOAD),
    ("zero.delay_updates_from=5", NO_OFFLOAD),
    ("zero.optimizer_memory=device zero.memory=nvme", NO_OFFLOAD),
    ("zero.secondary_partition=True", "without zero.replicas; leave it out"),
    ("model.full_attention_every=2", NO_WINDOW),
    ("model.sliding_window=0 model.full_attention_every=2", NO_WINDOW),
    ("evaluation.min_improvement=0.1", "without evaluation.early_stopping; "),
    ("observe.profile_num_steps=5", "without observe.profile; leave it out"),
    # Values that the old setting did not have.
    ("zero.optimizer_memory=None", "use one of device, pinned_host, nvme, auto"),
    ("zero.memory=disk", "use one of pinned_host, nvme, auto, device"),
    ("zero.shard_over_replica=1", "=1 is not a choice; use one of True, False"),
    ("zero.shard_over_replica=None", "=None is not a choice; use one of True"),
    ("pipeline.schedule=zb_h1 pipeline.recompute=True", "no effect with pipeline.sch"),
]


@pytest.mark.parametrize(("settings", "problem"), REFUSED)
def test_an_old_setting_without_effect_is_refused_wherever_it_stands(settings, problem):
    overrides = settings.split()
    given = dict(map(mappings.parse_override, overrides))
    bindings = [f"config.{path} = {value!r}" for path, value in given.items()]
    found = outcome({}, *overrides)
    assert problem in found and found.startswith(overrides[-1].partition("=")[0])
    assert found == outcome(given)
    assert found == outcome({}, *reversed(overrides))
    with pytest.raises(ConfigError) as refused:
        gin.from_gin(bindings=bindings)
    assert f"{refused.value}" == found


BOTH = [
    ({"zero": {"offload": "nvme", "optimizer_memory": "device"}}, "zero.offload"),
    ({"zero": {"offload": None, "optimizer_memory": "nvme"}}, "zero.offload"),
    ({"zero": {"offload": "nvme", "memory": "auto"}}, "zero.offload"),
    (
        {
            "zero": {
                "replicas": {"quantized_weights": True},
                "shard_over_replica": False,
            }
        },
        "zero.replicas",
    ),
    (
        {"model": {"positions": {"kind": "rotary", "theta": 5.0}, "rope_theta": 7.0}},
        "model.positions.theta",
    ),
    (
        {"communication": {"num_local_steps": 10, "local_steps": {"num_steps": 20}}},
        "communication.local_steps.num_steps",
    ),
    (
        {"model": {"sliding_window": 0, "window": {"size": 128}}},
        "model.window.size",
    ),
    ({"pipeline": {"kind": "gpipe", "schedule": "interleaved"}}, "pipeline"),
    ({"optimizer": {"name": "lion", "rule": "sgd"}}, "optimizer.rule"),
]


@pytest.mark.parametrize(("values", "path"), BOTH)
def test_two_names_of_one_setting_are_refused_in_a_mapping(values, path):
    """The later of two changes wins in place, whichever name it has."""
    found = outcome(values)
    assert found.endswith(f" is the old name of {path}, {TOO}")
    old = found.partition("=")[0]
    ((section, inner),) = values.items()
    before = {n: x for n, x in inner.items() if f"{section}.{n}" != old}
    after = {n: x for n, x in inner.items() if n not in before}
    assert "old name" not in outcome({section: before}, {section: after})
    assert outcome({section: after}, {section: before}) == outcome({section: before})


ROUNDS = "communication.num_local_steps=10", "communication.local_steps.num_steps=10"
READ = [
    (["zero.nvme_paths=()"], []),
    ([{"zero": {"nvme_paths": []}}], []),
    (["zero.optimizer_memory=derived", "zero.gradient_memory=derived"], []),
    (["zero.shard_over_replica=true"], ["zero.replicas=sharded"]),
    (
        ["optimizer.schedule=one_cycle", "optimizer.cycle.cycles_momentum=true"],
        ["optimizer.schedule=one_cycle", "optimizer.schedule.momentum=cycled_momentum"],
    ),
    # The preset gives defaults, wherever it stands.
    (
        ["zero.gradient_memory=device", "zero.memory=pinned_host"],
        ["zero.offload=pinned_host"],
    ),
    (
        ["zero.parameter_memory=nvme", "zero.memory=auto", "zero.memory=nvme"],
        [
            "zero.offload=nvme",
            "zero.offload.parameter_memory=nvme",
            "zero.offload.gradient_memory=pinned_host",
        ],
    ),
    (
        ["zero.memory=nvme", "zero.offload=pinned_host"],
        [
            "zero.offload=pinned_host",
            "zero.offload.parameter_memory=pinned_host",
            "zero.offload.gradient_memory=pinned_host",
        ],
    ),
    # A switch in any place, and a setting under the present name.
    (
        ["communication.delay=2", ROUNDS[0]],
        [ROUNDS[1], "communication.local_steps.delay=2"],
    ),
    (
        ["communication.local_steps.delay=2", ROUNDS[0]],
        [ROUNDS[1], "communication.local_steps.delay=2"],
    ),
    ([ROUNDS[0], "communication.delay=2", "communication.local_steps=None"], []),
    ([ROUNDS[1], "communication.num_local_steps=0"], []),
    (["communication.num_local_steps=0", ROUNDS[1]], [ROUNDS[1]]),
    (
        ["model.positions=rotary", "model.rope_theta=5.0", {"model.positions": {}}],
        ["model.positions=rotary", "model.positions.theta=5.0"],
    ),
    (["model.moe.num_experts=0", "model.moe.top_k=2"], ["model.moe.top_k=2"]),
]


@pytest.mark.parametrize(("old", "new"), READ)
def test_old_settings_read_as_present_ones(old, new):
    assert zconfig.load_config({}, *old) == zconfig.load_config({}, *new)


def test_a_shipped_config_takes_old_names():
    """Fails if a switch that is off leaves settings behind, or hides other problems."""
    off = "communication.num_local_steps=0"
    config = zconfig.load_config("gpt2_diloco", off)
    assert config.communication.local_steps is None
    found = outcome("gpt2_diloco", off, "communication.delay=5", "model.norm=nope")
    assert f"communication.delay=5 has no effect {NO_ROUNDS}" in found
    assert "model.norm='nope'" in found


def test_a_record_is_read_without_a_word(caplog):
    """Fails if the user is told of names that zjax wrote."""
    renamed._tell.cache_clear()
    rounds = {"num_local_steps": 40, "num_synchronous_steps": 0, "delay": 5}
    record = {
        "communication": rounds,
        "zero": {"optimizer_memory": "device", "gradient_memory": "device"},
        "buckets": {"form": "none", "pacing": {"start": 256}},
    }
    assert convert.current(record) == {
        "communication": {
            "local_steps": {"num_steps": 40, "num_synchronous_steps": 0, "delay": 5}
        },
        "zero": {"offload": None},
        "buckets": None,
    }
    zero = {"shard_over_replica": True, "quantized_weights": False}
    assert convert.current({"zero": zero}) == {
        "zero": {"replicas": {"quantized_weights": False}}
    }
    sizes = {"pacing": {"kind": "linear", "start": 256}, "num_cycles": 4}
    buckets = {"form": "cut", "order": "grow", **sizes}
    config = load.saved_config({"config": {"buckets": buckets}})
    assert config.buckets == schema.Cut(order=schema.Grow(num_cycles=4))
    assert not caplog.messages
