"""Sparse attention of any length, and DeepSpeed's helpers for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from tests.kernels.sparse.dense import attend
from tests.support import sparse as small
from tests.support.refusals import config_error
from zjax.ops import sparse
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax_kernels import BigBird, Custom, Dense

MODES = {
    "fixed": schema.Fixed(num_local_blocks=2),
    "fixed, heads": schema.Fixed(
        num_different_global_patterns=2, different_layout_per_head=True
    ),
    "variable": schema.Variable(
        num_random_blocks=1,
        local_window_blocks=(1, 2),
        global_block_indices=(1, 3),
        global_block_end_indices=(2, 5),
        different_layout_per_head=True,
        seed=3,
    ),
    "bigbird": schema.Bigbird(different_layout_per_head=True),
    "bslongformer": schema.Bslongformer(global_block_indices=(0, 2)),
    "local": schema.Local(num_sliding_window_blocks=1),
    "dense": schema.Dense(),
}


def make_model(mode, kind="decoder", **changes):
    attention = schema.Sparse(pattern=MODES[mode], block=small.BLOCK)
    return dataclasses.replace(small.GPT, kind=kind, attention=attention, **changes)


def make_heads(length, *, rows=2, heads=2, kv_heads=2, size=8):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(rows, length, n, size) for n in (heads, kv_heads, kv_heads)]
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_see_what_the_blocks_of_the_longest_sequence_say(mode, kind):
    """Fails if a setting is lost, a direction is wrong or a layout is not cut."""
    config = make_model(mode, kind)
    found = sparse.sparse_of(config)
    for length in (small.LENGTH, 37):
        mask = small.mask_of(config, length)
        positions = jnp.arange(length)[None]
        seen = sparse.visible_keys(found, positions, positions)[0]
        np.testing.assert_array_equal(seen, mask)
    blocks = found.pattern.layout(small.LENGTH)
    cut = sparse._first_blocks(blocks, 3).to_dense()
    np.testing.assert_array_equal(cut, blocks.to_dense()[:, :3, :3])


def test_what_a_program_holds_of_a_pattern_is_its_live_blocks():
    """Fails if an array of all blocks is a constant of the program of each step."""
    pattern = BigBird(12, 16, different_layout_per_head=True)
    found = sparse.Sparse(pattern, 16_384)
    positions = jnp.zeros((1, 1), jnp.int32)
    program = jax.make_jaxpr(lambda x: sparse.visible_keys(found, x, x))(positions)
    live = sum(len(each.columns) for each in pattern.layout(16_384).patterns)
    size = sum(np.size(each) for each in program.consts)
    assert live < size < 1.2 * live


def test_where_no_block_lives_no_key_is_seen():
    found = sparse.Sparse(Custom(2, live=np.zeros((2, 2))), 32)
    positions = jnp.arange(32)[None]
    assert not sparse.visible_keys(found, positions, positions).any()


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize(("length", "masked"), [(small.LENGTH, True), (37, False)])
def test_attention_is_dense_attention_under_the_mask(kind, length, masked):
    """Lengths that are not whole blocks, masks, documents, and heads that share."""
    config = make_model("bigbird", kind, num_kv_heads=1)
    heads = make_heads(length, kv_heads=1)
    masks, visible = {}, small.mask_of(config, length)[None]
    if masked:
        ids = np.sort(np.random.default_rng(0).integers(1, 3, (2, length)))
        keys = np.arange(length) < np.array([length, length - 9])[:, None]
        masks = {"segment_ids": jnp.array(ids), "key_mask": jnp.array(keys)}
        same = ids[:, None, :, None] == ids[:, None, None, :]
        visible = visible & same & keys[:, None, None]
    run = jax.jit(sparse.sparse_attention, static_argnums=3)
    found = run(*heads, sparse.sparse_of(config), **masks)
    expected, _ = attend(*heads, visible)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_mask_of_tokens_hides_more_than_the_pattern(kind):
    """Fails if a plan is taken that was made of another mask, or a mask is not cut."""
    config, length = make_model("bigbird", kind), 37
    heads = make_heads(length)
    for seed in range(2):
        mask = np.random.default_rng(seed).random((length, length)) < 0.7
        found = sparse.sparse_attention(*heads, sparse.sparse_of(config), mask=mask)
        expected, _ = attend(*heads, small.mask_of(config, length)[None] & mask)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "of_device"),
    [
        pytest.param(2, 2, (1, small.LENGTH, 1, 8), id="rows-and-heads"),
        pytest.param(3, 1, (3, small.LENGTH, 1, 8), id="neither-divides"),
    ],
)
def test_rows_and_heads_are_split_over_the_mesh(rows, kv_heads, of_device):
    """Fails if heads of a device take the layout of others, or rows are gathered."""
    mode = "bigbird" if kv_heads == 2 else "fixed, heads"
    found = sparse.sparse_of(make_model(mode))
    heads = make_heads(small.LENGTH, rows=rows, kv_heads=kv_heads)

    def gradients(*heads):
        return jax.grad(
            lambda *x: jnp.sin(sparse.sparse_attention(*x, found)).sum(), (0, 1, 2)
        )(*heads)

    expected = jax.jit(gradients)(*heads)
    with jax.set_mesh(meshes.make_mesh(schema.Mesh(tensor=2), jax.devices()[:4])):
        traced = jax.jit(gradients).trace(*heads)
        result = traced.lower().compile()(*heads)
    text = str(traced.jaxpr)
    assert "shard_map" in text
    assert f"f32[{','.join(map(str, of_device))}]" in text
    for x, y in zip(result, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_one_device_needs_no_split():
    found = sparse.sparse_of(make_model("local"))
    heads = make_heads(small.LENGTH)
    with jax.set_mesh(meshes.make_mesh(schema.Mesh(), jax.devices()[:1])):
        text = str(
            jax.make_jaxpr(lambda *x: sparse.sparse_attention(*x, found))(*heads)
        )
    assert "shard_map" not in text


def test_plans_are_made_once():
    """Fails if a layout is made again with each layer, step or trace."""
    found = sparse.sparse_of(make_model("bigbird", max_length=112))
    heads = make_heads(112)
    sparse._plan.cache_clear()
    for _ in range(2):
        jax.eval_shape(lambda *x: sparse.sparse_attention(*x, found), *heads)
    again = sparse.sparse_of(make_model("bigbird", max_length=112))
    jax.eval_shape(lambda *x: sparse.sparse_attention(*x, again), *heads)
    assert sparse._plan.cache_info().misses == 1


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("mode", ["bigbird", "fixed", "dense"])
def test_share_of_live_pairs(mode, kind):
    """Under causality a diagonal counts half, as in dense attention."""
    config = make_model(mode, kind)
    found = sparse.live_fraction(sparse.sparse_of(config), small.LENGTH)
    mask = small.mask_of(config)
    diagonal = mask.shape[0] * small.LENGTH / 2 if kind == "decoder" else 0
    assert found == pytest.approx((mask.sum() - diagonal) / mask.size)


@dataclasses.dataclass(frozen=True)
class Listed(Dense):
    blocks: np.ndarray | None = None


NO_RULE = (
    "is not a sparsity pattern; give one like zjax_kernels.BigBird(num_heads=4), or an "
    "array as zjax_kernels.Custom"
)


@pytest.mark.parametrize(
    ("pattern", "length", "message"),
    [
        pytest.param(None, 96, f"sparsity_config=None {NO_RULE}", id="none"),
        pytest.param(
            "bigbird",
            0,
            f"sparsity_config='bigbird' {NO_RULE}\n"
            "max_seq_length=0 is not a number of tokens; give 1 or more",
            id="a-name-and-no-token",
        ),
        pytest.param(
            Listed(1, blocks=np.ones((1, 1))),
            96,
            "sparsity_config=Listed(num_heads=1, block=16, attention='bidirectional', "
            "token_causal=True, different_layout_per_head=False, blocks=array([[1.]])) "
            "is not hashable; keep tuples in its fields, not arrays",
            id="an-array-in-a-field",
        ),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, length, message, untyped):
    with config_error(message):
        sparse.Sparse(pattern, length)


def test_longer_than_the_layout_is_refused():
    found = sparse.sparse_of(make_model("local"))
    with config_error(
        "length=100 exceeds the 96 tokens of the layout; shorten the sequence, or "
        "raise model.max_length or max_seq_length"
    ):
        sparse.sparse_attention(*make_heads(100), found)


def test_padding_to_blocks_and_back():
    ids = jnp.arange(10).reshape(2, 5)
    vectors = jnp.ones((2, 5, 3))
    padded = zjax.pad_to_block_size(
        4,
        ids,
        jnp.ones((2, 5)),
        jnp.ones((2, 5), jnp.int32),
        ids,
        vectors,
        pad_token_id=7,
        model_embeddings=lambda ids: jnp.full((*ids.shape, 3), ids[0, 0] + 0.5),
    )
    pad_len, *arrays = padded
    ends = [np.asarray(x)[0, 5:].ravel().tolist() for x in arrays]
    assert pad_len == 3
    assert ends == [[7] * 3, [0.0] * 3, [0] * 3, [7] * 3, [7.5] * 9]
    np.testing.assert_array_equal(
        zjax.unpad_sequence_output(pad_len, padded.inputs_embeds), vectors
    )
    whole = zjax.pad_to_block_size(5, inputs_embeds=vectors)
    assert whole.pad_len == 0 and whole.input_ids is None
    assert whole.attention_mask.tolist() == [[True] * 5] * 2
    np.testing.assert_array_equal(zjax.unpad_sequence_output(0, vectors), vectors)


def test_padding_has_the_dtype_of_the_vectors():
    vectors = jnp.ones((1, 5, 3), jnp.bfloat16)
    padded = zjax.pad_to_block_size(
        4, inputs_embeds=vectors, model_embeddings=lambda ids: jnp.ones((1, 3, 3))
    )
    assert padded.inputs_embeds.dtype == jnp.bfloat16


def test_position_tables_repeat():
    table = jnp.arange(8.0).reshape(4, 2)
    bert = zjax.extend_position_embedding(table, 10)
    np.testing.assert_array_equal(bert, table[np.arange(10) % 4])
    roberta = zjax.extend_position_embedding(table, 4, num_reserved=2)
    np.testing.assert_array_equal(roberta, table[np.array([0, 1, 2, 3, 2, 3])])


IDS, VECTORS, TABLE = jnp.ones((2, 5), int), jnp.ones((2, 5, 3)), jnp.ones((4, 2))


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (
            zjax.pad_to_block_size,
            {"block_size": 4},
            "input_ids=None leaves nothing to pad; give ids or vectors",
        ),
        *[
            (
                zjax.pad_to_block_size,
                {"block_size": size, "input_ids": IDS},
                f"block_size={size!r} is not an integer >= 1; give 1 or more",
            )
            for size in (0, 4.0)
        ],
        (
            zjax.pad_to_block_size,
            {"block_size": 4, "input_ids": IDS, "pad_token_id": None},
            "pad_token_id=None is not an integer >= 0; give 0 or more",
        ),
        (
            zjax.pad_to_block_size,
            {"block_size": 4, "input_ids": IDS[0]},
            "input_ids.shape=(5,) is not [batch, tokens]; give one row for each text",
        ),
        (
            zjax.pad_to_block_size,
            {"block_size": 4, "input_ids": IDS, "attention_mask": IDS[:, 1:]},
            "attention_mask.shape=(2, 4) differs from (2, 5), that of input_ids; give "
            "one for each token",
        ),
        (
            zjax.pad_to_block_size,
            {"block_size": 4, "input_ids": IDS[:, 1:], "inputs_embeds": VECTORS},
            "inputs_embeds.shape=(2, 5, 3) differs from (2, 4), that of input_ids; "
            "give one for each token",
        ),
        (
            zjax.pad_to_block_size,
            {
                "block_size": 4,
                "inputs_embeds": VECTORS,
                "model_embeddings": lambda ids: jnp.ones((2, 3, 4)),
            },
            "model_embeddings(ids).shape=(2, 3, 4) is not (2, 3, 3), as inputs_embeds "
            "need; return a vector for each id, as long as those",
        ),
        (
            zjax.unpad_sequence_output,
            {"pad_len": 9, "sequence_output": jnp.ones((1, 8))},
            "pad_len=9 is not below the 8 tokens of sequence_output; give what "
            "pad_to_block_size returned",
        ),
        (
            zjax.extend_position_embedding,
            {"table": TABLE, "max_position": 4},
            "max_position=4 is no more than the 4 of the table; leave the table as it "
            "is",
        ),
        (
            zjax.extend_position_embedding,
            {"table": TABLE, "max_position": 9, "num_reserved": 4},
            "num_reserved=4 leaves no position of table.shape=(4, 2); give fewer, or a "
            "table with rows after them",
        ),
        (
            zjax.extend_position_embedding,
            {"table": TABLE[:0], "max_position": 9},
            "num_reserved=0 leaves no position of table.shape=(0, 2); give fewer, or a "
            "table with rows after them",
        ),
    ],
)
def test_what_cannot_be_padded_or_cut_is_refused(function, given, message, untyped):
    with config_error(message):
        function(**given)
