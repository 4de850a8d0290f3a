"""DeepSpeed's module, in Linen and in NNX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from tests.kernels.sparse.dense import attend, mask_of
from zjax.errors import ConfigError
from zjax.ops import sparse
from zjax_kernels import BigBird, Custom, Fixed, Pattern, SparsityConfig

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


@FLAVOURS
def test_an_array_of_blocks_is_a_rule(make):
    live = np.random.default_rng(0).random((2, 5, 5)) < 0.5
    pattern, heads = Custom(2, live=live), make_heads()
    expected, _ = attend(*heads, visible(pattern))
    found = jax.jit(make(pattern))(*heads)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Shifted(SparsityConfig):
    """Each row sees the block that many before it."""

    shift: int = 0

    def heads(self, num_blocks):
        rows = np.arange(num_blocks)
        columns = (rows - self.shift) % num_blocks
        return [Pattern.from_entries(rows, columns, num_blocks, num_blocks)]


@FLAVOURS
def test_rules_that_differ_in_a_field_of_their_own_have_their_own_layouts(make):
    """Fails if a rule is given the layout of another, kept before."""
    heads = make_heads()
    for pattern in (Shifted(2, shift=1), Shifted(2, shift=2)):
        expected, _ = attend(*heads, visible(pattern))
        found = make(pattern)(*heads)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


CAUSAL = np.tri(LENGTH, dtype=bool)


@FLAVOURS
@pytest.mark.parametrize(
    ("mode", "mask"),
    [
        pytest.param("mul", CAUSAL, id="bool"),
        pytest.param("mul", jnp.array(CAUSAL, jnp.int32)[None, None], id="1-and-0"),
        pytest.param("add", np.where(CAUSAL, 0.0, -10_000.0), id="0-and-ten-thousand"),
        pytest.param(
            "add",
            jnp.where(CAUSAL, 0.0, -jnp.inf).astype(jnp.bfloat16),
            id="0-and-infinity",
        ),
    ],
)
def test_a_mask_of_pairs_hides_more_than_the_pattern(make, mode, mask):
    """DeepSpeed hides later tokens of a block so, in unidirectional attention too."""
    pattern = Fixed(2, attention="unidirectional", token_causal=False)
    module, heads = make(pattern, attn_mask_mode=mode), make_heads()
    padding = jnp.ones((2, LENGTH)).at[1, :3].set(0)
    run = jax.jit(lambda *x: module(*x, attn_mask=mask))
    expected, _ = attend(*heads, visible(pattern) & CAUSAL)
    np.testing.assert_allclose(run(*heads), expected, rtol=1e-5, atol=1e-5)
    module = make(pattern, key_padding_mask_mode="mul", attn_mask_mode=mode)
    found = module(*heads, key_padding_mask=padding, attn_mask=mask)
    keys = np.asarray(padding)[:, None, None] != 0
    expected, _ = attend(*heads, visible(pattern) & CAUSAL & keys)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@FLAVOURS
def test_a_mask_of_pairs_is_planned_once(make):
    module, heads = make(), make_heads(37)
    sparse._plan.cache_clear()
    for mask in (CAUSAL, CAUSAL.astype(int), CAUSAL.T):
        module(*heads, attn_mask=mask[:37, :37])
    assert sparse._plan.cache_info().misses == 2


@FLAVOURS
def test_a_mask_of_keys_may_have_the_dims_of_scores(make):
    mask = jnp.zeros((2, LENGTH)).at[1, 50:].set(-10_000.0)
    module, heads = make(), make_heads()
    found = module(*heads, key_padding_mask=mask[:, None, None])
    np.testing.assert_array_equal(found, module(*heads, key_padding_mask=mask))


def refusal(error, message, id, *, of_module=(), **masks):
    return pytest.param(dict(of_module), masks, error, message, id=id)


@FLAVOURS
@pytest.mark.parametrize(
    ("of_module", "masks", "error", "message"),
    [
        refusal(
            NotImplementedError,
            "rpe.shape=(1, 2, 80, 80) cannot be added to the scores of blocks; give "
            "what only masks to zjax_kernels.make_plan(..., mask=), or use "
            "jax.nn.dot_product_attention(..., bias=)",
            "positions",
            rpe=np.zeros((1, 2, 80, 80)),
        ),
        refusal(
            ConfigError,
            "attn_mask.shape=(80, 79) is not (80, 80); give one number for each",
            "other-pairs",
            attn_mask=np.ones((80, 79)),
        ),
        refusal(
            ConfigError,
            "attn_mask=-1.5 neither masks a key nor leaves it visible; use 0.0 and "
            "-10000.0, "
            "or attn_mask_mode='mul'",
            "biases",
            attn_mask=np.full((80, 80), -1.5),
            of_module={"attn_mask_mode": "add"},
        ),
        refusal(
            ConfigError,
            "key_padding_mask=1.0 neither masks a key nor leaves it visible; use 0.0 "
            "and "
            "-10000.0, or key_padding_mask_mode='mul'",
            "other-mode",
            key_padding_mask=np.ones((2, 80)),
        ),
        refusal(
            ConfigError,
            "key_padding_mask=nan neither masks a key nor leaves it visible; use 0.0 "
            "and "
            "-10000.0, or key_padding_mask_mode='mul'",
            "not-a-number",
            key_padding_mask=np.full((2, 80), np.nan),
        ),
        refusal(
            ConfigError,
            "key_padding_mask.shape=(2, 79) is not (2, 80); give one number for each",
            "other-keys",
            key_padding_mask=np.ones((2, 79)),
        ),
    ],
)
def test_masks_that_cannot_be_used_are_refused(make, of_module, masks, error, message):
    with pytest.raises(error) as found:
        make(**of_module)(*make_heads(), **masks)
    assert str(found.value) == message


@FLAVOURS
@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_masks_of_ones_are_refused_where_numbers_are_added(make, dtype):
    """Such are those of Hugging Face; traced, they made NaN of every row."""
    mask, heads = jnp.ones((2, LENGTH), dtype), make_heads()
    with pytest.raises(ConfigError) as error:
        jax.jit(lambda m: make()(*heads, key_padding_mask=m))(mask)
    assert str(error.value) == (
        f"key_padding_mask.dtype='{dtype}' is not a floating dtype, as additive masks "
        "need; use 0.0 and -10000.0, or key_padding_mask_mode='mul'"
    )


@FLAVOURS
def test_a_mask_of_pairs_that_is_not_known_in_time_is_refused(make):
    heads = make_heads()
    with pytest.raises(NotImplementedError) as error:
        jax.jit(lambda m: make()(*heads, attn_mask=m))(CAUSAL)
    assert str(error.value) == (
        "attn_mask.shape=(80, 80) is known only while the program runs; close over an "
        "array, or make a plan before with zjax_kernels.make_plan(..., mask=)"
    )


def test_other_modes_are_refused(untyped):
    module = linen(key_padding_mask_mode="and", attn_mask_mode=None)
    with pytest.raises(ConfigError) as error:
        module(*make_heads())
    assert str(error.value) == (
        "key_padding_mask_mode='and' is not a mode; use 'add' or 'mul'\n"
        "attn_mask_mode=None is not a mode; use 'add' or 'mul'"
    )


@FLAVOURS
@pytest.mark.parametrize(
    ("of_query", "of_value", "message"),
    [
        pytest.param(
            (80, 2, 8),
            (80, 2, 8),
            "query.shape=(80, 2, 8) is not [batch, tokens, 2, channels]; give one or "
            "more of each, and the heads of the pattern third",
            id="no-batch",
        ),
        pytest.param(
            (2, 0, 2, 8),
            (2, 0, 2, 8),
            "query.shape=(2, 0, 2, 8) is not [batch, tokens, 2, channels]; give one or "
            "more of each, and the heads of the pattern third",
            id="no-token",
        ),
        pytest.param(
            (2, 80, 4, 8),
            (2, 80, 4, 8),
            "query.shape=(2, 80, 4, 8) is not [batch, tokens, 2, channels]; give one "
            "or more of each, and the heads of the pattern third",
            id="other-heads",
        ),
        pytest.param(
            (2, 80, 2, 8),
            (2, 79, 2, 8),
            "value.shape=(2, 79, 2, 8) is not [2, 80, heads, 8]; give one for each of "
            "the queries",
            id="fewer-values",
        ),
    ],
)
def test_other_shapes_are_refused(make, of_query, of_value, message, untyped):
    query, value = jnp.ones(of_query), jnp.ones(of_value)
    with pytest.raises(ConfigError) as error:
        make()(query, query, value)
    assert str(error.value) == message


def test_a_mask_that_no_program_can_refuse_makes_nan():
    """Fails if numbers that would have to be added are lost in silence."""
    mask = jnp.zeros((2, LENGTH)).at[1, 3].set(-1.5)
    module = nnx()
    found = jax.jit(lambda m, *x: module(*x, key_padding_mask=m))(mask, *make_heads())
    assert np.isnan(found).all(axis=(1, 2, 3)).tolist() == [False, True]
