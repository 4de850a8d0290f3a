"""Rules of the configuration that say what the dims of parameters are."""

import jax
import jax.numpy as jnp
import pytest

from zjax.config import check_config, load_config, schema
from zjax.errors import ConfigError, PlanError
from zjax.sharding import naming
from zjax.typing import Model

PARAMS = {
    "up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)},
    "blocks": {"kernel": jnp.zeros((2, 4, 8))},
}
NAMES = {
    "up": {"kernel": None, "bias": ("mlp",)},
    "blocks": {"kernel": ("layers", "embed", None)},
}


def names_by_path(*rules):
    model = Model(
        init=lambda key: (PARAMS, {}),
        loss=lambda *args: None,
        bind=lambda *args: None,
        logical=lambda params: NAMES,
    )
    rules = tuple(schema.DimRule(pattern=p, dims=dims) for p, dims in rules)
    names = naming.names_of_dims(model, PARAMS, rules)
    paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(PARAMS)]
    keys = [jax.tree_util.keystr(p, simple=True, separator="/") for p in paths]
    return dict(zip(keys, names, strict=True))


def test_without_rules_names_are_those_of_the_model():
    assert names_by_path() == {
        "blocks/kernel": ("layers", "embed", None),
        "up/bias": ("mlp",),
        "up/kernel": (None, None),
    }


def test_first_rule_wins_and_the_dim_of_layers_stays():
    found = names_by_path(("up/kernel", ("", "tensor")), ("kernel$", ("mlp",)))
    assert found["up/kernel"] == (None, "tensor")
    assert found["blocks/kernel"] == ("layers", "mlp", None)
    assert found["up/bias"] == ("mlp",)


def test_impossible_rules_are_refused_together():
    with pytest.raises(PlanError) as error:
        names_by_path(
            ("kernel", ("", "", "mlp")),
            ("up/k", ("mlp",)),
            ("gate", ("mlp",)),
            ("bias", ("tensr",)),
        )
    assert str(error.value) == (
        "mesh.rules[1].pattern='up/k' matches 1 parameters, all taken by earlier "
        "rules; move this rule before them\n"
        "mesh.rules[2].pattern='gate' matches none of 3 parameters; paths look like "
        "up/bias, up/kernel, blocks/kernel\n"
        "mesh.rules[3].dims=('tensr',) has no rule for tensr; use one of batch, "
        "length, embed, heads, kv_heads, head_dim, mlp, vocab, experts, capacity, "
        "layers, tensor, or ''\n"
        "mesh.rules[0].dims=('', '', 'mlp') names 3 dims, and blocks/kernel has 2; "
        "name each dim once, from the first on\n"
        "mesh.rules[0].dims=('', '', 'mlp') names 3 dims, and up/kernel has 2; "
        "name each dim once, from the first on"
    )


def test_patterns_are_checked_before_there_is_a_model():
    rules = "mesh.rules=[{'pattern': '('}, {'pattern': 'x'}, {'pattern': 'x'}]"
    with pytest.raises(ConfigError) as error:
        check_config(load_config({}, rules), 8)
    assert str(error.value) == (
        "mesh.rules[0].pattern='(' is not a regular expression: missing ), "
        "unterminated subpattern at position 0; correct it, or escape characters "
        "with \\\n"
        "mesh.rules[2].pattern='x' never matches after mesh.rules[1]; remove one"
    )
