"""DeepSpeed's module, in Linen and in NNX."""

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
