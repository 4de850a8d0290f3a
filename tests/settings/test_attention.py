"""Settings of attention: sparse patterns and latents."""

import dataclasses
import itertools

import pytest

from zjax import config as zconfig
from zjax.config import check_config, load_config
from zjax.ops import sparse
from zjax.settings import attention, choices, mappings, schema, sequence
from zjax_kernels import SparsityConfig
from zjax_kernels.sparse import chunks

PATTERNS = choices.kinds(mappings.type_of("model.attention.pattern"))
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


def test_devices_of_a_sequence_have_tiles_of_the_kernels():
    assert sequence.TILE == chunks.TILE


def test_heads_have_the_channels_of_latents():
    """Fails if `embed_size` over `num_heads` counts, or heads must divide it."""
    latent = {"key_rank": 16, "plain_size": 8, "value_size": 8}
    rotary = {"positions": {"kind": "rotary", "size": 4}, "use_bias": False}
    config = load_config({"model": {"latent": latent, "num_heads": 5} | rotary})
    check_config(config, 1)
    model = config.model
    assert (model.head_size, model.value_size, model.num_kv_heads) == (12, 8, 5)
    assert schema.Model().value_size == 64
