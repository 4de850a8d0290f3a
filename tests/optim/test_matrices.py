"""Which parameters decay, and which sides Muon sees."""

import pytest

from zjax.optim import matrices

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
    assert matrices.is_matrix(path, len(dims), names) is decays
    found = matrices.muon_dims(path, len(dims), names)
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
    assert matrices.is_matrix(path, num_dims, {}) is decays
    assert (matrices.muon_dims(path, num_dims, {}) is not None) is muon


def test_names_skip_what_is_unknown():
    params = {"a": [1.0, 2.0], "b": 3.0}
    logical = {"a": [("embed",), None], "b": ()}
    assert matrices.names_by_path(params, logical) == {"a/0": ("embed",), "b": ()}
