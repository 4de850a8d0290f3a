"""DeepSpeed's module and helpers, in Linen and in NNX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from tests.kernels.sparse.dense import attend, mask_of
from zjax_kernels import BigBird, Fixed

LENGTH = 80
PATTERN = BigBird(num_heads=2, block=16, different_layout_per_head=True)


def linen(pattern=PATTERN, **given):
    module = zjax.linen.SparseSelfAttention(pattern, max_seq_length=LENGTH, **given)
    return lambda *args, **masks: module.apply({}, *args, **masks)


def nnx(pattern=PATTERN, **given):
    return zjax.nnx.SparseSelfAttention(pattern, max_seq_length=LENGTH, **given)


FLAVOURS = pytest.mark.parametrize("make", [linen, nnx])


def make_heads(length=LENGTH):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, length, 2, 8)) for key in keys]


def visible(pattern, length=LENGTH):
    return mask_of(pattern.layout(LENGTH))[:, :, :length, :length]


@FLAVOURS
@pytest.mark.parametrize(
    ("mode", "masked", "seen"),
    [("mul", 0, 1), ("mul", False, True), ("add", -10_000.0, 0.0), ("add", -np.inf, 0)],
)
def test_module_is_dense_attention_under_the_mask(make, mode, masked, seen):
    keys = np.arange(LENGTH) < np.array([[LENGTH], [50]])
    mask = jnp.array(np.where(keys, seen, masked))
    module, heads = make(key_padding_mask_mode=mode), make_heads()
    run = jax.jit(lambda *x: module(*x, key_padding_mask=mask))
    expected, _ = attend(*heads, visible(PATTERN) & keys[:, None, None])
    np.testing.assert_allclose(run(*heads), expected, rtol=1e-5, atol=1e-5)


@FLAVOURS
def test_shorter_sequences_have_the_first_blocks(make):
    pattern = Fixed(2, 16, attention="unidirectional", num_local_blocks=2)
    heads = make_heads(37)
    expected, _ = attend(*heads, visible(pattern, 37))
    np.testing.assert_allclose(make(pattern)(*heads), expected, rtol=1e-5, atol=1e-5)


REMEDY = (
    "cannot be added to the scores of blocks; put a mask into the layout, as "
    "zjax_kernels.BlockLayout.from_dense reads it, or use jax.nn.dot_product_attention"
)


@FLAVOURS
@pytest.mark.parametrize(
    ("masks", "error", "message"),
    [
        (
            {"rpe": np.zeros((1, 2, 80, 80))},
            NotImplementedError,
            f"rpe of shape (1, 2, 80, 80) {REMEDY}",
        ),
        (
            {"attn_mask": np.ones((80, 80))},
            NotImplementedError,
            f"attn_mask of shape (80, 80) {REMEDY}",
        ),
        (
            {"key_padding_mask": np.ones((2, 80))},
            ValueError,
            "key_padding_mask=1.0 neither masks a key nor leaves it; use 0 and -10000, "
            "or key_padding_mask_mode='mul'",
        ),
        (
            {"key_padding_mask": np.ones((2, 79))},
            ValueError,
            "key_padding_mask.shape=(2, 79) is not (2, 80); give one number per key",
        ),
    ],
)
def test_what_kernels_cannot_do_is_refused(make, masks, error, message):
    given = {name: jnp.array(mask, jnp.float32) for name, mask in masks.items()}
    with pytest.raises(error) as found:
        make()(*make_heads(), **given)
    assert str(found.value) == message


def test_a_mask_that_no_program_can_refuse_makes_nan():
    """Fails if numbers that would have to be added are lost in silence."""
    mask = jnp.zeros((2, LENGTH)).at[1, 3].set(-1.5)
    module = nnx()
    found = jax.jit(lambda m, *x: module(*x, key_padding_mask=m))(mask, *make_heads())
    assert np.isnan(found).all(axis=(1, 2, 3)).tolist() == [False, True]


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
    with pytest.raises(ValueError, match="leaves nothing to pad"):
        zjax.pad_to_block_size(4)


def test_position_tables_repeat():
    table = jnp.arange(8.0).reshape(4, 2)
    bert = zjax.extend_position_embedding(table, 10)
    np.testing.assert_array_equal(bert, table[np.arange(10) % 4])
    roberta = zjax.extend_position_embedding(table, 4, num_reserved=2)
    np.testing.assert_array_equal(roberta, table[np.array([0, 1, 2, 3, 2, 3])])
    with pytest.raises(ValueError, match=r"^max_position=4 is no more than the 4 of"):
        zjax.extend_position_embedding(table, 4)
