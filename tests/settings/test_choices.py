"""A choice takes the settings that it reads, and every number has a legal range."""

import dataclasses
import itertools
import typing

import pytest

from tests.support.refusals import refusal
from zjax import config as zconfig
from zjax.settings import choices, convert, derived, mappings, ranges, renamed, schema


def all_choices(section=schema.Config, path=""):
    """Path and annotation of every choice, in every section."""
    for field in dataclasses.fields(section):
        hint = typing.get_type_hints(section)[field.name]
        name = f"{path}.{field.name}" if path else field.name
        if choices.kinds(hint):
            yield name, hint
        for one in choices.sections(hint):
            yield from all_choices(one, name)


CHOICES = dict(all_choices())
NEEDED = {"distill": ["distill.teacher=runs/a"]}
"""Settings that a kind cannot be without."""
each_choice = pytest.mark.parametrize("path", CHOICES)


def settings_of(path, kind):
    """Overrides that make a choice, and the choices around it."""
    names, overrides = path.split("."), []
    for end in range(1, len(names)):
        outer, inner = ".".join(names[:end]), names[end]
        if outer in CHOICES:
            fits = next(
                k
                for k, one in choices.kinds(CHOICES[outer]).items()
                if one and inner in choices.names(one)
            )
            overrides += [f"{outer}={fits}", *NEEDED.get(fits, ())]
    return [*overrides, f"{path}={kind}", *NEEDED.get(kind, ())]


@each_choice
def test_every_kind_is_chosen_by_name_and_printed(path):
    for kind, section in choices.kinds(CHOICES[path]).items():
        config = zconfig.load_config({}, *settings_of(path, kind))
        chosen = config
        for name in path.split("."):
            chosen = getattr(chosen, name)
        assert type(chosen) is (section or type(None))
        assert (
            convert.from_mapping(schema.Config, mappings.to_mapping(config)) == config
        )


@each_choice
def test_a_setting_of_another_kind_is_refused_by_name(path):
    """Fails where a choice takes, or drops, what it does not read."""
    kinds = choices.kinds(CHOICES[path])
    for (kind, section), (other, read) in itertools.permutations(kinds.items(), 2):
        if section is None or read is None:  # None is turned on by what is inside
            continue
        for name in sorted({*choices.names(read)} - {*choices.names(section)}):
            value = choices.default_of(read, name)
            hint = typing.get_type_hints(read)[name]
            if typing.get_origin(hint) is typing.Literal:
                changed = next(x for x in typing.get_args(hint) if x != value)
            elif isinstance(value, bool | int | float):
                changed = not value if isinstance(value, bool) else value + 1
            else:
                continue
            if renamed.UNREAD.get(f"{path}.{name}") == changed:
                continue  # an old config says what the choice does
            given = [*settings_of(path, kind), f"{path}.{name}={changed}"]
            start = f"{path}.{name}={changed!r} has no effect with {path}={kind!r}; "
            assert refusal(given).startswith(start + "leave it out, or set "), other


@each_choice
def test_settings_of_one_name_have_one_type_and_one_default(path):
    """A change of the kind alone keeps them, and a default that is left is no wish."""
    found = {}
    for section in choices.sections(CHOICES[path]):
        hints = typing.get_type_hints(section, include_extras=True)
        for name in choices.names(section):
            now = hints[name], choices.default_of(section, name)
            assert found.setdefault(name, now) == now


@each_choice
def test_a_setting_inside_chooses_the_only_section(path):
    kinds = choices.kinds(CHOICES[path])
    if {*kinds} != {choices.NONE, other := next(iter(kinds))}:
        return
    for name in choices.names(kinds[other]):
        value = choices.default_of(kinds[other], name)
        if value in renamed.SWITCHES.get(f"{path}.{name}", ()):
            continue
        given = [*settings_of(path, "none"), {f"{path}.{name}": value}]
        off = zconfig.load_config({}, *given[:-1])
        assert zconfig.load_config({}, *given) != off
        assert zconfig.load_config(off, given[-1]) != off
        assert zconfig.load_config({}, *given, f"{path}=none") == off


@pytest.mark.parametrize("switch", renamed.SWITCHES)
def test_an_old_value_that_switched_a_section_off_is_none(switch, caplog):
    renamed._tell.cache_clear()
    path, _, name = switch.rpartition(".")
    section = mappings.to_mapping(choices.sections(CHOICES[path])[0]())
    for off in renamed.SWITCHES[switch]:
        record = {path: section | {name: off}}
        assert zconfig.load_config(record) == schema.Config()
        assert zconfig.load_config(record, {path: section}, {switch: off}) == (
            schema.Config()
        )
        assert f"{switch}={off!r} is now {path}=None; " in caplog.text


@pytest.mark.parametrize("old", ["num_fragments=1", "mixing=0.0"])
def test_a_default_under_an_old_name_does_not_turn_a_section_on(old):
    """Fails if a printed config of the last release reads back to another run."""
    off = "communication.num_local_steps=0", f"communication.{old}"
    assert zconfig.load_config({}, *off) == schema.Config()


def test_a_default_under_an_old_name_changes_a_section_that_is_on():
    given = "communication.num_fragments=3", "communication.num_fragments=1"
    found = zconfig.load_config({}, "communication.num_local_steps=500", *given)
    assert found.communication.local_steps == schema.LocalSteps()


def test_an_override_of_an_old_name_is_parsed_as_the_setting_that_it_was():
    """Fails if a list without brackets, or a text that looks like a number, is not."""
    overrides = "zero.memory=nvme", "zero.nvme_paths=/a,1", "model.sliding_window=8"
    config = zconfig.load_config({}, *overrides)
    assert config.zero.placement.nvme_paths == ("/a", "1")
    assert config.model.window == schema.SlidingWindow(size=8)


def test_old_experts_that_choose_say_that_they_have_no_balance_loss():
    old = {"choice": "experts", "num_experts": 4, "balance_loss": 0.0}
    moe = zconfig.load_config({"model": {"moe": old}}).model.moe
    assert isinstance(moe, schema.ExpertChoice)


def test_an_old_zero_bubble_schedule_says_that_it_recomputes_nothing():
    old = {"schedule": "zb_h1", "recompute": False}
    assert zconfig.load_config({"pipeline": old}).pipeline == schema.ZbH1()


def test_old_settings_of_codes_are_read_as_a_choice():
    old = {"rank": 4, "quantize": "int8", "block_size": 16}
    adapters = zconfig.load_config({"lora": old}).lora
    assert adapters == schema.Lora(rank=4, quantize=schema.Int8(block_size=16))
    old |= {"quantize": "", "block_size": 64}
    assert zconfig.load_config({"lora": old}).lora == schema.Lora(rank=4)


def test_defaults_of_other_kinds_are_no_wish():
    """Files that list every setting, such as records of runs, read back."""
    values = {"optimizer": {"rule": {"kind": "sgd", "b2": 0.95, "eps": 1e-8}}}
    rule = convert.from_mapping(schema.Config, values).optimizer.rule
    assert rule == schema.Sgd()


def test_a_config_file_sets_a_choice_by_kind_and_then_what_is_inside():
    config = zconfig.base()
    config.optimizer.schedule = "one_cycle"
    config.optimizer.schedule.num_rise_steps = 5
    config.optimizer.schedule.momentum = {"max_momentum": 0.7}
    assert zconfig.load_config(config).optimizer.schedule == schema.OneCycle(
        num_rise_steps=5, momentum=schema.CycledMomentum(max_momentum=0.7)
    )
    config.mesh = "auto"
    assert zconfig.load_config(config).mesh.tensor == 0


def test_a_config_file_sets_a_choice_inside_a_section_that_is_off():
    config = zconfig.base()
    config.buckets.order = "grow"
    config.buckets.order.num_cycles = 4
    config.buckets = "pad"
    order = schema.Grow(num_cycles=4)
    assert zconfig.load_config(config).buckets == schema.Pad(order=order)


def test_a_config_file_sets_a_choice_under_an_old_name():
    config = zconfig.base()
    config.model.positions = "rotary"
    config.model.rope_scaling = "linear"
    config.model.rope_scaling.factor = 4.0
    found = zconfig.load_config(config).model.positions.scaling
    assert found == schema.LinearRope(factor=4.0)


def test_none_in_a_config_file_drops_what_the_file_set_before():
    config = zconfig.base()
    config.model.latent.query_rank = 8
    config.model.latent = None
    assert zconfig.load_config(config).model.latent is None


@pytest.mark.parametrize("old", [*renamed.MOVED, *renamed.SECTIONS])
def test_an_old_name_leads_to_a_setting(old):
    new = renamed.MOVED[old].path if old in renamed.MOVED else renamed.SECTIONS[old]
    assert mappings.type_of(new) is not None
    assert mappings.type_of(old) is None


def test_an_old_name_is_read_and_told_once(caplog):
    renamed._tell.cache_clear()
    for _ in range(2):
        config = zconfig.load_config({"optimizer": {"name": "lion", "b1": 0.8}})
    assert config.optimizer.rule == schema.Lion(b1=0.8)
    assert caplog.messages == [
        "optimizer.name is now optimizer.rule; the old name is read in this release "
        "only",
        "optimizer.b1 is now optimizer.rule.b1; the old name is read in this release "
        "only",
    ]


def test_a_later_override_by_the_new_name_wins_over_an_old_one():
    old = {"optimizer": {"b1": 0.8}}
    config = zconfig.load_config(old, "optimizer.rule.b1=0.7")
    assert config.optimizer.rule.b1 == 0.7
    assert not derived.is_derived(config.optimizer.rule.b1)


REST = "use 1 or more, -1 for the rest"


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("seed", "-1", "use 0 to 4294967295"),
        ("seed", "4294967296", "use 0 to 4294967295"),
        ("num_steps", "0", "use 1 or more"),
        ("global_batch_size", "-1", "use 0 or more"),
        ("mesh.data", "-2", "use 1 or more, or -1 for the rest"),
        ("mesh.tensor", "-2", f"{REST}, or 0 for zjax to choose"),
        ("model.moe.num_experts", "-1", "use 1 to 65536"),
        ("optimizer.peak_learning_rate", "0.0", "use more than 0"),
        ("optimizer.peak_learning_rate", "inf", "use more than 0"),
        ("optimizer.rule.b1", "1.0", "use 0 or more and less than 1"),
        ("optimizer.clip_norm", "0.0", "use more than 0, or inf for no limit"),
        ("optimizer.schedule.final_fraction", "1.1", "use 0 to 1"),
        ("model.dropout_rate", "-0.1", "use 0 or more and less than 1"),
        ("model.vocab_size", "1", "use 2 or more, or 0 to derive it"),
        ("num_steps", f"{2**31}", "use at most 2147483647"),
        ("model.num_heads", f"{2**31 - 1}", "use at most 4194304"),
        ("model.num_layers", f"{2**62}", "use at most 16384"),
        ("optimizer.peak_learning_rate", "1e+300", "use at most 3e+38"),
        ("optimizer.rule.eps", "1e-300", "use at least 1.2e-38"),
    ],
)
def test_number_out_of_range(setting, value, remedy):
    """Only the range is reported: rules that would divide by the number stay out."""
    message = f"{setting}={value} is out of range; {remedy}"
    assert refusal([f"{setting}={value}"]).splitlines()[0] == message


SECTIONS = [s for s in vars(schema).values() if dataclasses.is_dataclass(s)]
each_section = pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)


@each_section
def test_no_number_is_without_bounds(section):
    """Fails where a setting takes any number: its sizes would overflow, or take all."""
    for name, hint in typing.get_type_hints(section).items():
        if hint in (int, float):
            allowed = ranges.range_of(section, name)
            huge = 2**63 if name == "min_shard_elements" else 2**33
            for value in (huge, 2**62, -(2**62)) if hint is int else (1e39, -1e39):
                assert allowed.remedy_for(value) or (name, value) == (
                    "min_shard_elements",
                    2**62,
                )


LIMITS = [
    pytest.param(section, name, mark.setting, id=f"{section.__name__}.{name}")
    for section in SECTIONS
    for name, hint in typing.get_type_hints(section, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
    if isinstance(mark, ranges.AtMost)
]


@pytest.mark.parametrize(("section", "name", "limit"), LIMITS)
def test_a_number_above_another_setting_is_refused(section, name, limit):
    """Fails too where a number that is out of range is given as a limit."""
    config, other = schema.Config(), limit.removeprefix("config.")
    is_of_run = other != limit
    given = section()
    most = getattr(config if is_of_run else given, other)
    for value in (most, 2 * most):
        one = dataclasses.replace(given, **{name: value})
        found = "\n".join(map(str, ranges.range_problems(one, "x", config)))
        place = "" if is_of_run else "x."
        message = f"x.{name}={value} is above {place}{other}={most}; use at most {most}"
        assert found == (message if value > most else "")
    if is_of_run:
        config = dataclasses.replace(config, **{other: 0})
        assert not [*ranges.range_problems(one, "x", config)]
