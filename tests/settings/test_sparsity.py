"""Settings of sparse attention, with the exact words of each refusal."""

import dataclasses
import itertools

import pytest

from tests.support.refusals import case, refusal
from zjax import config as zconfig
from zjax.errors import ConfigError
from zjax.ops import sparse
from zjax.settings import attention, choices, convert, schema, sequence
from zjax_kernels import SparsityConfig
from zjax_kernels.sparse import cells

SPARSE = "model.attention=sparse;"
PATTERN = "model.attention.pattern"
FIELD = f"{PATTERN}."

REFUSALS = [
    case(
        SPARSE + "data.length=1000",
        "data.length=1000 is not a multiple of model.attention.block=64; use 960 or "
        "1024",
        id="length",
    ),
    case(
        SPARSE + "data.length=32",
        "data.length=32 is not a multiple of model.attention.block=64; use 64",
        id="short",
    ),
    case(
        SPARSE + f"{FIELD}num_global_blocks=3",
        "model.attention.pattern.num_global_blocks=3 does not divide "
        "model.attention.pattern.num_local_blocks=4; use 1, 2 or 4",
        id="globals",
    ),
    case(
        SPARSE + f"{FIELD}num_different_global_patterns=5",
        "model.attention.pattern.num_different_global_patterns=5 is more than the 4 "
        "places in a window of 4 blocks; use at most 4\n"
        "model.attention.pattern.num_different_global_patterns=5 needs heads that "
        "differ; use 1, or set model.attention.pattern.different_layout_per_head=True",
        id="places",
    ),
    case(
        SPARSE + f"{FIELD}horizontal_global_attention=True",
        "model.attention.pattern.horizontal_global_attention=True lets tokens see "
        "later ones, which model.kind='decoder' rules out; use False",
        id="horizontal",
    ),
    case(
        SPARSE + f"{PATTERN}=variable;{FIELD}local_window_blocks=(4, 0);"
        f"{FIELD}global_block_indices=(-1,)",
        "model.attention.pattern.local_window_blocks=(4, 0) is not a list of windows "
        "of 1 block or more; use one like (4,)\n"
        "model.attention.pattern.global_block_indices=(-1,) counts blocks from 0; use "
        "one like (0,)",
        id="windows",
    ),
    case(
        SPARSE + f"{PATTERN}=bslongformer;{FIELD}global_block_end_indices=(1, 2)",
        "model.attention.pattern.global_block_end_indices=(1, 2) does not end each of "
        "model.attention.pattern.global_block_indices=(0,); give one end after each "
        "start, or () for single blocks",
        id="ends",
    ),
    case(
        SPARSE + f"{PATTERN}=bigbird;{FIELD}num_random_blocks=17;data.length=100",
        "data.length=100 is not a multiple of model.attention.block=64; use 64 or "
        "128\n"
        "model.attention.pattern.num_random_blocks=17 is more than the 16 blocks of "
        "model.max_length=1024; use at most 16",
        id="two-at-once",
    ),
    case(
        SPARSE + "model.attention.block=48",
        "model.attention.block=48 is not a choice; use one of 16, 32, 64, 128",
        id="block",
    ),
    case(
        "model.attention.block=16",
        "model.attention.block=16 has no effect with model.attention='auto'; leave it "
        "out, or set model.attention to 'sparse'",
        id="not-sparse",
    ),
    case(
        SPARSE + f"{FIELD}seed=1",
        "model.attention.pattern.seed=1 has no effect with "
        "model.attention.pattern='fixed'; leave it out, or set "
        "model.attention.pattern to 'variable' or 'bigbird'",
        id="other-mode",
    ),
    case(
        SPARSE + f"{FIELD}num_local_blocks=0",
        "model.attention.pattern.num_local_blocks=0 is out of range; use 1 or more",
        id="range",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), REFUSALS)
def test_refused_with_these_words(overrides, num_devices, message):
    try:
        text = refusal(overrides, num_devices)
    except ConfigError as error:
        text = str(error)
    assert text == message


PATTERNS = choices.kinds(convert.type_of("model.attention.pattern"))
VALUES = {
    "num_local_blocks": (1, 4),
    "num_global_blocks": (0, 1, 2, 9),
    "horizontal_global_attention": (False, True),
    "num_different_global_patterns": (1, 3),
    "different_layout_per_head": (False, True),
    "num_random_blocks": (-1, 0, 8),
    "num_sliding_window_blocks": (1, 8),
    "local_window_blocks": ((), (1, 2), (0,)),
    "global_block_indices": ((), (0, 2), (-1,)),
    "global_block_end_indices": ((), (1, 3), (1, 1), (4,)),
}


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("mode", PATTERNS)
def test_what_is_accepted_makes_a_layout(mode, kind):
    """Fails if the settings and the patterns do not refuse the same."""
    kind_of_pattern = PATTERNS[mode]
    names = [name for name in VALUES if name in choices.names(kind_of_pattern)]
    outcomes = set()
    for values in itertools.product(*(VALUES[name] for name in names)):
        given = dict(zip(names, values, strict=True))
        rule = schema.Sparse(pattern=kind_of_pattern(**given), block=16)
        model = schema.Model(kind=kind, attention=rule, max_length=96)
        config = schema.Config(model=model, data=schema.Data(length=96))
        accepted = not list(attention.sparsity_problems(config, 1))
        try:
            sparse._layout(sparse.sparse_of(model))
        except ValueError:
            assert not accepted, given
        else:
            assert accepted, given
        outcomes.add(accepted)
    assert outcomes == ({True, False} if names else {True})


@pytest.mark.parametrize("mode", PATTERNS)
def test_patterns_have_the_settings_that_their_rules_take(mode):
    """Of the patterns whose heads are alike, some take the name all the same."""
    unread = {*choices.names(SparsityConfig)}
    if mode in ("bslongformer", "dense"):
        unread.add("different_layout_per_head")
    takes = {field.name for field in dataclasses.fields(sparse._PATTERNS[mode])}
    assert {*choices.names(PATTERNS[mode])} == takes - unread


def test_deepspeed_defaults():
    """Settings left alone are those of DeepSpeed's classes, but for the block."""
    for mode, rule in sparse._PATTERNS.items():
        given = schema.Sparse(pattern=PATTERNS[mode]())
        model = schema.Model(kind="encoder", attention=given)
        expected = rule(model.num_heads, 64, attention="bidirectional")
        assert sparse.sparse_of(model).pattern == expected


def test_a_record_with_a_section_of_sparsity_is_read():
    listed = {"mode": "bigbird", "block": 16, "num_local_blocks": 4, "seed": 3}
    record = {"model": {"attention": "sparse", "sparsity": listed}}
    pattern = schema.Bigbird(seed=3)
    expected = schema.Sparse(pattern=pattern, block=16)
    assert zconfig.load_config(record).model.attention == expected
    usual = {"mode": "fixed", "block": 64, "num_random_blocks": -1}
    record = {"model": {"attention": "xla", "sparsity": usual}}
    assert zconfig.load_config(record).model.attention == schema.Xla()


def test_defaults_can_work():
    config = zconfig.load_config({}, "model.attention=sparse")
    zconfig.check_config(config, 8)


def test_devices_of_a_sequence_have_tiles_of_the_kernels():
    assert sequence.TILE == cells.TILE
