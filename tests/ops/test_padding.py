"""DeepSpeed's helpers for models of sparse attention."""

import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from zjax.errors import ConfigError


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


def refusal(function, given, message, id):
    return pytest.param(function, given, message, id=id)


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        refusal(
            zjax.pad_to_block_size,
            {"block_size": 4},
            "input_ids=None leaves nothing to pad; give ids or vectors",
            "nothing-to-pad",
        ),
        *[
            refusal(
                zjax.pad_to_block_size,
                {"block_size": size, "input_ids": IDS},
                f"block_size={size!r} is not an integer >= 1; give 1 or more",
                f"blocks-of-{size!r}",
            )
            for size in (0, -4, 4.0, "4")
        ],
        refusal(
            zjax.pad_to_block_size,
            {"block_size": 4, "input_ids": IDS, "pad_token_id": None},
            "pad_token_id=None is not an integer >= 0; give 0 or more",
            "no-id-of-padding",
        ),
        refusal(
            zjax.pad_to_block_size,
            {"block_size": 4, "input_ids": IDS[0]},
            "input_ids.shape=(5,) is not [batch, tokens]; give one row for each text",
            "ids-without-a-batch",
        ),
        refusal(
            zjax.pad_to_block_size,
            {"block_size": 4, "inputs_embeds": VECTORS[0]},
            "inputs_embeds.shape=(5, 3) is not [batch, tokens, channels]; give one row "
            "for each text",
            "vectors-without-a-batch",
        ),
        refusal(
            zjax.pad_to_block_size,
            {"block_size": 4, "input_ids": IDS, "attention_mask": IDS[:, 1:]},
            "attention_mask.shape=(2, 4) differs from (2, 5), that of input_ids; give "
            "one "
            "for each token",
            "a-shorter-mask",
        ),
        refusal(
            zjax.pad_to_block_size,
            {"block_size": 4, "input_ids": IDS[:, 1:], "inputs_embeds": VECTORS},
            "inputs_embeds.shape=(2, 5, 3) differs from (2, 4), that of input_ids; "
            "give one "
            "for each token",
            "more-vectors-than-ids",
        ),
        refusal(
            zjax.pad_to_block_size,
            {
                "block_size": 4,
                "inputs_embeds": VECTORS,
                "model_embeddings": lambda ids: jnp.ones((2, 3, 4)),
            },
            "model_embeddings(ids).shape=(2, 3, 4) is not (2, 3, 3), as inputs_embeds "
            "need; return a vector for each id, as long as those",
            "longer-vectors",
        ),
        refusal(
            zjax.unpad_sequence_output,
            {"pad_len": 9, "sequence_output": jnp.ones((1, 8))},
            "pad_len=9 is not below the 8 tokens of sequence_output; give what "
            "pad_to_block_size returned",
            "more-padding-than-tokens",
        ),
        refusal(
            zjax.unpad_sequence_output,
            {"pad_len": -1, "sequence_output": jnp.ones((1, 8))},
            "pad_len=-1 is not an integer >= 0; give 0 or more",
            "less-than-no-padding",
        ),
        refusal(
            zjax.extend_position_embedding,
            {"table": TABLE, "max_position": 4},
            "max_position=4 is no more than the 4 of the table; leave the table as it "
            "is",
            "no-more-positions",
        ),
        refusal(
            zjax.extend_position_embedding,
            {"table": TABLE, "max_position": 4.5},
            "max_position=4.5 is not an integer >= 1; give 1 or more",
            "half-a-position",
        ),
        refusal(
            zjax.extend_position_embedding,
            {"table": TABLE, "max_position": 9, "num_reserved": -1},
            "num_reserved=-1 is not an integer >= 0; give 0 or more",
            "less-than-none-reserved",
        ),
        refusal(
            zjax.extend_position_embedding,
            {"table": TABLE, "max_position": 9, "num_reserved": 4},
            "num_reserved=4 leaves no position of table.shape=(4, 2); give fewer, or a "
            "table with rows after them",
            "all-reserved",
        ),
        refusal(
            zjax.extend_position_embedding,
            {"table": TABLE[:0], "max_position": 9},
            "num_reserved=0 leaves no position of table.shape=(0, 2); give fewer, or a "
            "table with rows after them",
            "an-empty-table",
        ),
    ],
)
def test_what_cannot_be_padded_or_cut_is_refused(function, given, message, untyped):
    with pytest.raises(ConfigError) as error:
        function(**given)
    assert str(error.value) == message
