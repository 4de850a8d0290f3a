"""Dtypes of a run, and the loss scale."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference.loss_scale import LossScale
from tests.support import rules
from zjax.optim import precision
from zjax.settings import schema


@pytest.mark.parametrize(
    ("compute", "reduce", "expected"),
    [
        ("bfloat16", "compute", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float16", "compute", "float16"),
        ("float32", "compute", "float32"),
    ],
)
def test_reduction_follows_the_compute_dtype_unless_named(compute, reduce, expected):
    settings = schema.Precision(compute_dtype=compute, reduce_dtype=reduce)
    dtypes = precision.make_dtypes(settings)
    assert dtypes == precision.Dtypes(
        master=jnp.dtype("float32"),
        compute=jnp.dtype(compute),
        grad_sum=jnp.dtype("float32"),
        reduce=jnp.dtype(expected),
    )


def test_cast_changes_floating_arrays_alone():
    tree = {
        "weights": jnp.ones(2),
        "tokens": jnp.arange(2),
        "mask": jnp.ones(2, bool),
        "waves": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(0),
    }
    cast = precision.cast_floating(tree, jnp.float16)
    assert cast["weights"].dtype == jnp.float16
    for name in ("tokens", "mask", "waves", "key"):
        assert cast[name] is tree[name]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            schema.Precision(),
            "master weights and moments float32 | compute bfloat16 | gradients over "
            "devices bfloat16, over microbatches float32 | loss scale none | "
            "non-finite gradient: skip",
        ),
        (
            schema.Precision(matmul_dtype="float8"),
            "master weights and moments float32 | compute bfloat16, projections in "
            "float8 | gradients over devices bfloat16, over microbatches float32 | "
            "loss scale none | non-finite gradient: skip",
        ),
        (
            schema.Precision(compute_dtype="float16", on_nonfinite="stop"),
            "master weights and moments float32 | compute float16 | gradients over "
            "devices float16, over microbatches float32 | loss scale 65536, doubled "
            "after 1000 clean steps | non-finite gradient: stop",
        ),
        (
            schema.Precision(
                compute_dtype="float16",
                reduce_dtype="float32",
                loss_scale=schema.LossScale(initial=128.0, window=0),
            ),
            "master weights and moments float32 | compute float16 | gradients over "
            "devices float32, over microbatches float32 | loss scale 128, fixed | "
            "non-finite gradient: skip",
        ),
    ],
    ids=["bfloat16", "float8", "float16", "float16 with a fixed scale"],
)
def test_precision_is_one_line(settings, expected):
    line = precision.describe_precision(settings, schema.Adamw())
    assert line == expected


@pytest.mark.parametrize(
    ("optimizer", "master", "expected"),
    [
        ({}, "bfloat16", "master weights bfloat16, moments float32"),
        ({"moment_dtype": "int8"}, "float32", "master weights float32, moments int8"),
        (
            {"moment_dtype": "bfloat16"},
            "bfloat16",
            "master weights and moments bfloat16",
        ),
        ({"rule": "adafactor"}, "bfloat16", "master weights and moments bfloat16"),
    ],
    ids=["bfloat16 weights", "int8 moments", "bfloat16 both", "adafactor"],
)
def test_moments_are_named_where_they_differ_from_the_weights(
    optimizer, master, expected
):
    line = precision.describe_precision(
        schema.Precision(master_dtype=master), rules.optimizer(**optimizer).rule
    )
    assert line.split(" | ")[0] == expected


NUM_SEQUENCES, LENGTH = 10_000, 24


def run(flags, settings):
    """All states after each update."""

    def step(scaler, overflow):
        scaler = precision.update_scaler(scaler, overflow, settings)
        return scaler, scaler

    start = precision.init_scaler(settings)
    return jax.lax.scan(step, start, jnp.array(flags, bool))[1]


def settings_of(window, consecutive=False, hysteresis=2, minimum=1.0):
    return schema.LossScale(
        window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        minimum=minimum,
    )


def test_golden_sequence():
    flags = [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    states = run(flags, settings_of(4))
    scales = [65536] * 4 + [131072] * 3 + [65536] + [32768] * 5 + [65536] * 3
    assert states.scale.tolist() == scales
    assert states.hysteresis.tolist() == [2] * 6 + [1] * 7 + [2] * 2 + [1]


@pytest.mark.parametrize(
    ("consecutive", "scales", "hysteresis"),
    [
        (True, [65536] * 5, [1, 2, 1, 2, 1]),
        (False, [65536, 65536, 32768, 32768, 16384], [1] * 5),
    ],
    ids=["clean step restores tolerance", "tolerance stays used up"],
)
def test_golden_hysteresis(consecutive, scales, hysteresis):
    states = run([1, 0, 1, 0, 1], settings_of(4, consecutive))
    assert states.scale.tolist() == scales
    assert states.hysteresis.tolist() == hysteresis


@pytest.mark.parametrize("consecutive", [True, False], ids=["consecutive", "lasting"])
@pytest.mark.parametrize("window", [1, 2, 4, 1000])
def test_random_sequences_equal_the_plain_class(window, consecutive):
    """Each starts a few steps before the window ends, so that scales also grow."""
    settings = settings_of(window, consecutive, hysteresis=2, minimum=16_384.0)
    rng = np.random.default_rng(window)
    rates = rng.choice([0.02, 0.2, 0.6], size=(NUM_SEQUENCES, 1))
    flags = rng.random((NUM_SEQUENCES, LENGTH)) < rates
    start = rng.integers(max(0, window - 8), window + 2, NUM_SEQUENCES)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0))
    def final(iteration, flags):
        def step(scaler, overflow):
            return precision.update_scaler(scaler, overflow, settings), None

        scaler = precision.init_scaler(settings)._replace(iteration=iteration)
        return jax.lax.scan(step, scaler, flags)[0]

    got = final(jnp.asarray(start, jnp.int32), flags)
    want = []
    for iteration, sequence in zip(start.tolist(), flags.tolist(), strict=True):
        oracle = LossScale(65536.0, window, 2, consecutive, 16_384.0)
        oracle.iteration = iteration
        for overflow in sequence:
            oracle.update(overflow)
        want.append(oracle.fields())
    for mine, theirs in zip(got, zip(*want, strict=True), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert len(set(np.asarray(got.scale).tolist())) > 2


def test_scale_grows_first_after_a_window_and_one_more_clean_step():
    states = run([0] * 10, settings_of(4))
    assert states.scale.tolist() == [65536] * 4 + [131072] * 4 + [262144] * 2


def test_scale_never_falls_below_the_minimum():
    states = run([1] * 20, settings_of(4, minimum=1024.0))
    assert states.scale.tolist()[-1] == 1024.0
    assert min(states.scale.tolist()) == 1024.0


def test_window_of_zero_keeps_the_scale_and_counts_on():
    settings = settings_of(0)
    states = run([0, 1, 1, 1, 0], settings)
    assert states.scale.tolist() == [65536] * 5
    assert states.iteration.tolist() == [1, 2, 3, 4, 5]
    assert states.last_overflow.tolist() == [-1, 1, 2, 3, 3]
    least = dataclasses.replace(settings, initial=1.0, minimum=1.0, hysteresis=1)
    assert not precision.at_minimum(precision.init_scaler(least), least)


@pytest.mark.parametrize(
    ("num_overflows", "expected"),
    [(0, False), (1, True), (2, True)],
    ids=["one overflow is tolerated", "then none", "floor reached"],
)
def test_at_minimum_foretells_an_overflow_that_cannot_halve(num_overflows, expected):
    settings = schema.LossScale(initial=4.0, minimum=4.0, hysteresis=2)
    scaler = precision.init_scaler(settings)
    for _ in range(num_overflows):
        scaler = precision.update_scaler(scaler, jnp.bool_(True), settings)
    assert bool(precision.at_minimum(scaler, settings)) is expected


def test_scaler_keeps_its_dtypes():
    scaler = precision.init_scaler(schema.LossScale())
    after = precision.update_scaler(scaler, jnp.bool_(False), schema.LossScale())
    dtypes = ["float32", "int32", "int32", "int32"]
    assert [x.dtype.name for x in scaler] == [x.dtype.name for x in after] == dtypes
