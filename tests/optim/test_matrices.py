"""Which parameters decay, and which sides Muon sees."""

import jax.numpy as jnp
import pytest

from zjax.optim import groups
from zjax.settings import schema
from zjax.typing import Model

CASES = {
    "kernel": (("embed", "mlp"), True, ((0,), (1,))),
    "norm/scale": (("embed",), False, None),
    "scanned norm/scale": (("layers", "embed"), False, None),
    "scanned norm/gain": (("layers", "embed"), False, None),
    "scanned/kernel": (("layers", "embed", "mlp"), True, ((1,), (2,))),
    "stages of layers/kernel": (
        ("experts", "layers", "embed", "mlp"),
        True,
        ((2,), (3,)),
    ),
    "query/kernel": (("embed", "heads", "head_dim"), True, ((0,), (1, 2))),
    "key/kernel": (("embed", "kv_heads", "head_dim"), True, ((0,), (1, 2))),
    "out/kernel": (("layers", "heads", "head_dim", "embed"), True, ((1, 2), (3,))),
    "query/bias": (("heads", "head_dim"), False, None),
    "expert/kernel": (("experts", "embed", "mlp"), True, ((1,), (2,))),
    "gated expert/kernel": (
        ("experts", "embed", "gates", "mlp"),
        True,
        ((1,), (2, 3)),
    ),
    "experts/up_bias": (("layers", "experts", "gates", "mlp"), False, None),
    "experts/down_bias": (("experts", "embed"), False, None),
    "router/kernel": (("embed", "experts"), True, ((0,), (1,))),
    "wte/embedding": (("vocab", "embed"), True, None),
    "head/kernel": (("embed", "vocab"), True, None),
    "conv/kernel": ((None, None, None, None), True, None),
    "temperature": ((), False, None),
}


@pytest.mark.parametrize("path", CASES)
def test_role_follows_the_names_of_dims(path):
    dims, decays, sides = CASES[path]
    names = {path: dims}
    assert groups.is_matrix(path, len(dims), names) is decays
    found = groups.muon_dims(path, len(dims), names)
    assert found == sides


@pytest.mark.parametrize(
    ("path", "num_dims", "decays", "muon"),
    [
        ("kernel", 2, True, True),
        ("anything", 2, True, True),
        ("wte/embedding", 2, True, False),
        ("conv/kernel", 4, True, False),
        ("attention/bias", 2, False, False),
        ("gain", 1, False, False),
    ],
)
def test_role_follows_the_shape_where_names_are_unknown(path, num_dims, decays, muon):
    assert groups.is_matrix(path, num_dims, {}) is decays
    assert (groups.muon_dims(path, num_dims, {}) is not None) is muon


def test_names_skip_what_is_unknown_and_follow_the_settings_of_the_mesh():
    model = Model(
        init=lambda key: ({"a": [jnp.ones((2, 3)), jnp.ones(2)], "b": jnp.ones(2)}, {}),
        loss=lambda *args: None,
        bind=lambda *args: None,
        logical=lambda params: {"a": [("kv", "what"), None], "b": None},
    )
    rules = (schema.DimRule(pattern="b", dims=("layers",)),)
    table = schema.NameTable({"kv": "head_dim"}.items())
    _, names = groups.named_params(model, schema.Mesh(names=table, rules=rules))
    assert names == {"a/0": ("head_dim", None), "b": ("layers",)}
