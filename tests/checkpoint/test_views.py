"""Views of what a file stores: any form of a run from any other, part by part."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from zjax.checkpoint import layers
from zjax.checkpoint.layers import Source
from zjax.checkpoint.layout import Entry
from zjax.optim.precision import low_bits

LAYERS, WIDTH, HIDDEN = 3, 4, 12
SHAPES = {
    "norm/scale": (LAYERS, WIDTH),
    "mlp/up/kernel": (LAYERS, WIDTH, HIDDEN),
    "mlp/up/bias": (LAYERS, HIDDEN),
    "mlp/down/kernel": (LAYERS, HIDDEN, WIDTH),
    "mlp/down/bias": (LAYERS, WIDTH),
}
HIDDEN_DIMS = {"mlp/up/kernel": 2, "mlp/up/bias": 1, "mlp/down/kernel": 1}
FORMS = list(itertools.product([1, 2, 3], ["stacked", "apart"]))


def make_arrays():
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=shape).astype(np.float32) for n, shape in SHAPES.items()}


def stored(num_tiles, layers):
    """What a run of this form stores."""
    found = {}
    for name, x in make_arrays().items():
        if name in HIDDEN_DIMS and num_tiles > 1:
            for i, tile in enumerate(np.split(x, num_tiles, HIDDEN_DIMS[name])):
                found[name.replace("mlp/", f"mlp/tiles/{i}/")] = tile
        else:
            found[name] = x
    if layers == "apart":
        return {f"{n}[{i}]": x[i] for n, x in found.items() for i in range(LAYERS)}
    return found


def entries_of(arrays):
    return {name: Entry(x.shape, str(x.dtype)) for name, x in arrays.items()}


def source_of(arrays, read=None):
    return Source(entries_of(arrays), read or (lambda name, index: arrays[name][index]))


@pytest.mark.parametrize("wanted", FORMS, ids=str)
@pytest.mark.parametrize("given", FORMS, ids=str)
def test_arrays_of_each_form_are_seen_in_any_other(given, wanted):
    """Fails if a tile or a layer is read from the place of another."""
    expected = stored(*wanted)
    found = layers.match_layout(source_of(stored(*given)), entries_of(expected))
    assert found.entries == entries_of(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(found.read_all(name), x, err_msg=name)
        index = tuple(slice(n // 3, n) for n in x.shape)
        np.testing.assert_array_equal(found.read(name, index), x[index], err_msg=name)


def test_no_more_is_read_than_is_asked_for():
    """Fails if a device that needs a slice of a tile has the whole array read."""
    arrays, reads = stored(1, "stacked"), []

    def read(name, index):
        part = arrays[name][index]
        reads.append((name, part.size))
        return part

    wanted = entries_of(stored(3, "apart"))
    found = layers.match_layout(source_of(arrays, read), wanted)
    found.read("mlp/tiles/2/up/kernel[1]", (slice(0, 2), slice(1, 3)))
    assert reads == [("mlp/up/kernel", 4)]


def test_split_master_weights_are_whole_beneath_other_views():
    """Fails if low bits are cut into tiles beside high bits that are not."""
    whole = {f"master/{name}": x for name, x in make_arrays().items()}
    low = {name: low_bits(x) for name, x in whole.items()}
    high = {
        name.replace("master/", "params/"): x.astype(jnp.bfloat16)
        for name, x in whole.items()
    }
    found = layers.join_masters(source_of(low | high))
    names = {f"master/{n}": x for n, x in stored(2, "apart").items()}
    found = layers.match_layout(found, entries_of(names)).subtree("master")
    assert found.entries == entries_of(names)
    for name, x in names.items():
        np.testing.assert_array_equal(found.read_all(name), x, err_msg=name)


def test_a_cached_source_is_read_once_for_all_parts_of_an_array():
    arrays, reads = stored(1, "stacked"), []

    def read(name, index):
        reads.append(name)
        return arrays[name][index]

    cached = layers.cached(source_of(arrays, read))
    found = layers.match_layout(cached, entries_of(stored(2, "apart")))
    for layer, tile in itertools.product(range(LAYERS), range(2)):
        found.read_all(f"mlp/tiles/{tile}/up/kernel[{layer}]")
    assert reads == ["mlp/up/kernel"]
