"""Filters of decoded tokens: sorts of NumPy, the GPU kernels, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import cuda_program, num_kernels
from tests.support.refusals import value_error
from zjax_kernels import find_best, top_k_threshold, top_p_threshold
from zjax_kernels.decode.filters import exact_sum, mosaic_gpu, reference

INF = np.inf
FORMS = ("random", "ties", "forbidden", "equal", "far apart", "neighbours")
SIZES = (40, 1000, 8000)
"""A vector of the kernels, two, and sixteen, which take a second step of a sweep."""
MOST = 5
"""Best tokens that tests ask for: each is a sweep of the interpreter."""


def make_row(form, size):
    """A row of logits."""
    rng = np.random.default_rng(size)
    row = (3 * rng.normal(size=size)).astype(np.float32)
    if form == "ties":
        return np.round(row)
    if form == "forbidden":
        return np.where(np.arange(size) % 19 == 7, row, -INF).astype(np.float32)
    if form == "equal":
        return np.full(size, -2.5, np.float32)
    if form == "far apart":
        row *= np.float32(10) ** rng.integers(-30, 38, size).astype(np.float32)
    if form == "neighbours":
        one = np.float32(1)
        row = rng.choice([one, np.nextafter(one, one + one), 0, -one], size)
    return row.astype(np.float32)


def make_case(size):
    """Logits of all forms, twice in short rows, with numbers of tokens and shares."""
    times = 2 if size <= 1000 else 1
    rows = np.stack([make_row(form, size) for form in FORMS] * times)
    top_k = np.resize(np.int32([1, 2, 7, size // 2, size - 1, size, 3]), len(rows))
    shares = np.float32([1e-30, 0.1, 0.4999, 0.5, 0.9, 0.999, 1.0])
    return rows, top_k, np.resize(shares, len(rows))


def weights_of(logits):
    return np.exp(logits - logits.max(1, keepdims=True))


def flushed(thresholds):
    """Numbers with 0 in place of subnormal ones, which a CPU takes for 0."""
    thresholds = np.asarray(thresholds)
    tiny = np.finfo(np.float32).tiny
    return np.where(np.abs(thresholds) < tiny, np.float32(0), thresholds)


def best_of(row, count):
    """Sorts ids by logit, then by id."""
    return np.argsort(-row, kind="stable")[:count]


def interpreted(name):
    """A kernel under the interpreter."""
    params = InterpretGPUParams(detect_races=True)
    return functools.partial(getattr(mosaic_gpu, name), interpret=params)


@pytest.fixture(params=["reference", "mosaic_gpu"])
def run(request):
    """A function by name, of the reference or under the interpreter."""
    if request.param == "reference":
        return functools.partial(getattr, reference)
    return interpreted


@pytest.mark.parametrize("size", SIZES)
def test_top_k_threshold_is_a_sorted_logit(run, size):
    logits, top_k, _ = make_case(size)
    found = run("top_k_threshold")(jnp.asarray(logits), jnp.asarray(top_k))
    ranked = -np.sort(-logits, axis=1)
    expected = ranked[np.arange(len(logits)), top_k - 1]
    np.testing.assert_array_equal(flushed(found), flushed(expected))


@pytest.mark.parametrize("size", SIZES)
def test_top_p_threshold_has_the_share_and_no_larger_one_has(run, size):
    """Fails if a sum is inexact, a row reads another, or a threshold is not tight."""
    logits, _, shares = make_case(size)
    weights = weights_of(logits)
    wanted = shares * np.asarray(exact_sum(jnp.asarray(weights)))
    arrays = map(jnp.asarray, (logits, weights, wanted))
    found = flushed(run("top_p_threshold")(*arrays))
    for row, row_weights, share, threshold in zip(
        logits, weights, wanted, found, strict=True
    ):
        assert threshold in flushed(row)

        def weigh(kept, row_weights=row_weights):
            kept = np.where(kept, row_weights, np.float32(0))[None]
            return exact_sum(jnp.asarray(kept))[0]

        assert weigh(row >= threshold) >= share
        assert weigh(row > threshold) < share


@pytest.mark.parametrize("size", SIZES)
def test_kernel_weighs_bit_by_bit_as_the_reference(size):
    """Fails if a threshold of the kernel has another bit where a token decides."""
    logits, _, shares = make_case(size)
    weights = weights_of(logits)
    # Shares that are exactly sums of some tokens decide by the last bit.
    kept = np.where(logits >= np.median(logits, 1, keepdims=True), weights, 0)
    exact = np.asarray(exact_sum(jnp.asarray(kept)))
    total = shares * np.asarray(exact_sum(jnp.asarray(weights)))
    arrays = map(jnp.asarray, (logits, weights, np.where(shares > 0.4, exact, total)))
    arrays = tuple(arrays)
    found = interpreted("top_p_threshold")(*arrays)
    np.testing.assert_array_equal(found, reference.top_p_threshold(*arrays))


@pytest.mark.parametrize("size", SIZES)
def test_best_tokens_are_sorted_with_the_lowest_id_first(run, size):
    logits, *_ = make_case(size)
    counts = np.resize(np.int32([MOST, 1, 0, 3, -1]), len(logits))
    function = run("find_best")
    values, ids = function(jnp.asarray(logits), MOST, jnp.asarray(counts))
    for row, count, value, token in zip(logits, counts, values, ids, strict=True):
        count = max(count, 0)
        expected = best_of(row, count)
        np.testing.assert_array_equal(token[:count], expected)
        np.testing.assert_array_equal(value[:count], row[expected])


def test_all_tokens_of_a_short_row_with_many_forbidden_ones():
    """Fails if tokens of -inf come in another order, or padding is a token."""
    row = np.float32([[-INF, 1, -INF, 2, -INF, 1]])
    counts = jnp.array([6], jnp.int32)
    values, ids = interpreted("find_best")(jnp.asarray(row), 6, counts)
    assert ids.tolist() == [[3, 1, 5, 0, 2, 4]]
    np.testing.assert_array_equal(values, row[:, ids[0]])


def test_no_race(capfd):
    logits, top_k, shares = map(jnp.asarray, make_case(1000))
    interpreted("top_k_threshold")(logits, top_k)
    interpreted("top_p_threshold")(logits, jnp.exp(logits - logits.max()), shares)
    interpreted("find_best")(logits, 2, jnp.minimum(top_k, 2))
    assert "RACE" not in "".join(capfd.readouterr())


def test_places_that_a_row_does_not_ask_for():
    logits = jnp.asarray(make_row("random", 40))[None]
    values, ids = find_best(logits, 3, jnp.array([1], jnp.int32))
    assert values[0, 1:].tolist() == [-INF, -INF] and ids[0, 1:].tolist() == [0, 0]
    assert find_best(logits, 0, jnp.array([0], jnp.int32))[1].shape == (1, 0)


def calls(size, num_rows=3, **given):
    """Calls of all functions, as functions of one array."""
    numbers = jnp.full(num_rows, 2, jnp.int32)
    shares = jnp.full(num_rows, 0.5)
    return {
        "top_k_threshold": lambda x: top_k_threshold(x, numbers, **given),
        "top_p_threshold": lambda x: top_p_threshold(x, x, shares, **given),
        "find_best": lambda x: find_best(x, min(20, size), numbers, **given),
    }


@pytest.mark.parametrize("size", [1, 40, 50257, 128256, 262208])
@pytest.mark.parametrize("name", calls(1))
def test_every_call_is_one_kernel_on_cuda(on_hopper, name, size):
    """Fails if Mosaic cannot lower a call, or a call takes the reference."""
    x = jax.ShapeDtypeStruct((3, size), jnp.float32)
    assert num_kernels(calls(size)[name], x) == 1


@pytest.mark.parametrize("name", calls(1))
def test_rows_of_vmap_are_rows_of_one_kernel(on_hopper, name):
    """Fails if a pass of several positions runs a kernel for each, or loops."""
    x = jax.ShapeDtypeStruct((4, 3, 1000), jnp.float32)
    function = jax.vmap(calls(1000)[name])
    assert num_kernels(function, x) == 1
    assert "stablehlo.while" not in cuda_program(function, x)


@pytest.mark.parametrize("name", calls(1))
def test_vmap_equals_single_calls(name):
    rows = np.stack([make_row(form, 60) for form in FORMS]).reshape(2, 3, 60)
    logits = jnp.asarray(rows)
    logits = logits if name != "top_p_threshold" else jax.nn.softmax(logits)
    function = calls(60)[name]
    found = jax.vmap(function)(logits)
    expected = [function(each) for each in logits]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_arrays_that_do_not_fit():
    logits = jnp.ones((2, 5))
    with value_error(
        "logits.shape=(5,) is not [R, V] with tokens; give rows of logits\n"
        "top_k.dtype=float32 is not int32; cast it"
    ):
        top_k_threshold(logits[0], jnp.ones(5))
    with value_error(
        "logits.dtype=bfloat16 is not float32; cast it\n"
        "weights.shape=(2, 4) does not fit logits of shape (2, 5); give (2, 5)\n"
        "top_p.shape=(3,) does not fit logits of shape (2, 5); give (2,)"
    ):
        top_p_threshold(logits.astype(jnp.bfloat16), logits[:, :4], jnp.ones(3))
    with value_error("number=6 is not between 0 and a vocabulary of 5; ask for fewer"):
        find_best(logits, 6, jnp.array([1, 1], jnp.int32))


def test_what_the_kernel_refuses(on_hopper):
    nothing = jnp.ones((0, 5)), jnp.ones(0, jnp.int32)
    with value_error(
        "implementation=mosaic_gpu cannot run: it needs rows and there are none; give "
        "rows, or use implementation='reference'"
    ):
        top_k_threshold(*nothing, implementation="mosaic_gpu")
    assert top_k_threshold(*nothing).shape == (0,)
