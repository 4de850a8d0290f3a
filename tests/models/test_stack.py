import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import language
from tests.support.trees import assert_close
from zjax.models.build import make_model
from zjax.settings import schema
from zjax.sharding.layers import layers_of
from zjax.typing import Auxiliary

FORMS = {
    "tied": dataclasses.replace(language.GPT, dropout_rate=0.3),
    "untied-in-a-loop": dataclasses.replace(language.LLAMA, layers_per_scan=1),
}
KEY = jax.random.key(0)


def in_parts(stack, batch):
    """The loss of parameters in three parts, block by block."""
    (segment,) = stack.segments

    def loss(embed, segments, head):
        x, context = stack.embed(embed, batch, jax.random.fold_in(KEY, 0))
        blocks = layers_of(*segments, segment.num_blocks)
        for number, block in enumerate(blocks, start=1):
            block_key = jax.random.fold_in(KEY, number)
            x, auxiliary = segment.block(block, x, context, block_key)
            assert auxiliary == Auxiliary()
        return stack.head(head, x, batch)[0]

    return loss


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_block_by_block_equals_the_whole(config):
    """Fails if a part is left out, or one gradient of the tied table is lost."""
    model = make_model(schema.Config(model=config))
    params = language.params_of(language.make_language_model(config))
    batch, stack = language.make_text(config), model.stack

    def whole(params):
        return language.sums_of(model.bind(params, {}), batch, KEY).loss_sum

    loss, grads = jax.jit(jax.value_and_grad(whole))(params)
    parts = jax.jit(jax.value_and_grad(in_parts(stack, batch), (0, 1, 2)))
    parts_loss, part_grads = parts(*stack.split(params))
    np.testing.assert_allclose(parts_loss, loss, rtol=1e-5)
    assert_close(stack.join(*part_grads), grads, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("layers_per_scan", [1, 2])
def test_a_loop_saves_no_copy_of_frozen_weights(layers_per_scan):
    """Fails if blocks are given slices, which the gradient of a loop stacks."""
    config = dataclasses.replace(
        language.LLAMA,
        num_layers=8,
        mlp_size=512,
        remat="full",
        layers_per_scan=layers_per_scan,
    )
    model = make_model(schema.Config(model=config))
    params = jax.eval_shape(model.init, KEY)[0]
    batch = language.make_text(config)

    def loss(scales, blocks, others):
        mlp_norm = blocks["mlp_norm"] | {"scale": scales}
        blocks = blocks | {"mlp_norm": mlp_norm}
        return model.loss(others | {"blocks": blocks}, {}, batch, KEY).value

    others = {name: x for name, x in params.items() if name != "blocks"}
    scales = params["blocks"]["mlp_norm"]["scale"]
    lowered = jax.jit(jax.grad(loss)).lower(scales, params["blocks"], others)
    saved = lowered.compile().memory_analysis().temp_size_in_bytes
    matrices = sum(x.size for x in jax.tree.leaves(params["blocks"]["mlp"]))
    assert saved < 3 * matrices


def test_encoder_block_by_block_gives_the_loss_of_the_whole():
    model = language.make_language_model(language.BERT)
    stack = make_model(schema.Config(model=language.BERT)).stack
    batch = language.make_text(language.BERT)
    batch["lengths"] = jnp.array([5, 8], jnp.int32)
    parts = stack.split(language.params_of(model))
    found = jax.jit(in_parts(stack, batch))(*parts)
    expected = language.loss_of(model, batch).loss_sum
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("form", ["tied", "untied-in-a-loop"])
def test_shared_names_the_leaves_of_both_ends(form):
    stack = make_model(schema.Config(model=FORMS[form])).stack
    model = language.make_language_model(FORMS[form])
    embed, _, head = stack.split(language.params_of(model))
    common = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(embed)
    } & {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(head)
    }
    assert common == set(stack.shared)
