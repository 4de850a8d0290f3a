"""Groups by path, and the errors of groups that would change nothing."""

import jax.numpy as jnp
import pytest

from zjax.errors import ConfigError
from zjax.optim import groups
from zjax.settings.schema import Optimizer, ParamGroup

PARAMS = {
    "blocks": [
        {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
        {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    ],
    "head": {"kernel": jnp.ones((3, 5))},
}


def test_first_matching_group_wins():
    own = (
        ParamGroup(pattern="blocks/0"),
        ParamGroup(pattern="bias$"),
        ParamGroup(pattern="^head/", learning_rate_scale=0.0),
    )
    assert groups.label_params(PARAMS, own) == {
        "blocks": [
            {"kernel": "group_0", "bias": "group_0"},
            {"kernel": "default", "bias": "group_1"},
        ],
        "head": {"kernel": "frozen"},
    }


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            [ParamGroup(pattern="blocks/7/kernel")],
            "optimizer.groups[0].pattern='blocks/7/kernel' matches none of 5 "
            "parameters; paths look like blocks/1/kernel, blocks/0/kernel, "
            "blocks/1/bias",
        ),
        (
            [ParamGroup(pattern="blocks"), ParamGroup(pattern="blocks/1")],
            "optimizer.groups[1].pattern='blocks/1' matches 2 parameters, all taken "
            "by earlier groups; move this group before them",
        ),
        (
            [ParamGroup(pattern="bias", weight_decay=0.1)],
            "optimizer.groups[0].weight_decay=0.1 decays nothing, as no matrix is in "
            "the group; leave it at -1.0, or set optimizer.decay_vectors",
        ),
        (
            [ParamGroup(pattern=".*", learning_rate_scale=0.0)],
            "optimizer.groups=('.*',) freezes all 5 parameters; leave some to train",
        ),
        (
            [
                ParamGroup(pattern="^bias$", weight_decay=0.1),
                ParamGroup(pattern="bias$", weight_decay=0.1),
            ],
            "optimizer.groups[0].pattern='^bias$' matches none of 5 parameters; paths "
            "look like blocks/1/bias, blocks/0/bias, blocks/1/kernel\n"
            "optimizer.groups[1].weight_decay=0.1 decays nothing, as no matrix is in "
            "the group; leave it at -1.0, or set optimizer.decay_vectors",
        ),
    ],
    ids=["no match", "shadowed", "nothing to decay", "all frozen", "two at once"],
)
def test_groups_without_effect_are_refused(own, message):
    with pytest.raises(ConfigError) as error:
        groups.check_groups(Optimizer(groups=tuple(own)), PARAMS, {})
    assert str(error.value) == message


def test_groups_with_effect_pass():
    own = (
        ParamGroup(pattern="blocks/1", weight_decay=0.1, learning_rate_scale=0.5),
        ParamGroup(pattern="head", learning_rate_scale=0.0),
    )
    groups.check_groups(Optimizer(groups=own), PARAMS, {})
    groups.check_groups(Optimizer(), PARAMS, {})
    vectors = (ParamGroup(pattern="bias", weight_decay=0.1),)
    groups.check_groups(Optimizer(groups=vectors, decay_vectors=True), PARAMS, {})
