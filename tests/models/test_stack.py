import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import language
from zjax.config import schema
from zjax.models.build import make_model

FORMS = {
    "tied": language.GPT,
    "tied-in-a-loop": dataclasses.replace(language.GPT, layers_per_scan=1),
    "untied": language.LLAMA,
    "encoder": language.BERT,
    "dropout": dataclasses.replace(language.GPT, dropout_rate=0.3),
}


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_block_by_block_equals_the_whole(config):
    """Fails if a part is left out, or one gradient of the tied table is lost."""
    model = make_model(schema.Config(model=config))
    params = language.params_of(language.make_language_model(config))
    view = model.bind(params, {})
    batch, key = language.make_text(config), jax.random.key(0)
    stack = model.stack
    (segment,) = stack.segments

    def whole(params):
        return model.bind(params, {}).loss(batch, key).loss_sum

    def in_parts(embed, segments, head):
        x, context = stack.embed(embed, batch, jax.random.fold_in(key, 0))
        for number, block in enumerate(segments[0], start=1):
            block_key = jax.random.fold_in(key, number)
            x, aux = segment.block(block, x, context, block_key)
            assert aux.dtype == jnp.float32
        return stack.head(head, x, batch)[0]

    loss, grads = jax.jit(jax.value_and_grad(whole))(params)
    parts = jax.jit(jax.value_and_grad(in_parts, (0, 1, 2)))
    parts_loss, part_grads = parts(*stack.split(params))
    assert segment.num_blocks == len(part_grads[1][0]) == view.config.num_layers
    np.testing.assert_allclose(parts_loss, loss, rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5),
        stack.join(*part_grads),
        grads,
    )


@pytest.mark.parametrize("form", ["tied", "untied"])
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
