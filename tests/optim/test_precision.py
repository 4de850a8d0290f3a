"""Dtypes of a run, the loss scale, and rounding at random."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.reference import rounding as reference
from tests.reference.loss_scale import LossScale
from tests.support import rules
from zjax.optim import moments, precision
from zjax.settings import schema
from zjax.sharding import mesh as meshes


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


CODES = pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8], ids=["int8", "uint8"])


def bits_of(shape, step=0, salt=7):
    return moments.random_bits(shape, jnp.int32(step), salt)


def uniform_of(bits, num_bits):
    """The upper bits as a number from 0 to below 1."""
    return (np.asarray(bits) >> (32 - num_bits)) / 2.0**num_bits


def draw(shape, low, high, signed, seed=0):
    """Sizes spread evenly over the octaves from `2**low` to `2**high`."""
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.uniform(low, high, size=shape)
    return np.float32(size * (rng.choice([-1, 1], size=shape) if signed else 1))


def test_bits_are_even_and_independent_of_element_step_and_array():
    """Each bit of a million words, and each pair of neighbours, is a fair coin."""
    words = np.stack([bits_of((500, 500), step, salt) for step, salt in SEEDS])
    bits = np.unpackbits(words.view(np.uint8)).reshape(*words.shape, 32)
    assert abs(bits.mean((0, 1, 2)) - 0.5).max() < 5 * 0.5 / np.sqrt(words.size)
    for axis in (0, 1, 2):
        after = np.roll(bits, -1, axis)
        same = (bits == after).mean((0, 1, 2))
        assert abs(same - 0.5).max() < 5 * 0.5 / np.sqrt(words.size)
    assert len(np.unique(words[0])) > 0.9999 * words[0].size


SEEDS = [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_bits_are_those_of_one_device_on_every_mesh():
    mesh = meshes.make_mesh(schema.Mesh())
    whole = bits_of((24, 16, 5), step=3)
    for spec in (P("data"), P(None, "data")):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        split = jax.jit(lambda: bits_of((24, 16, 5), step=3), out_shardings=sharding)
        np.testing.assert_array_equal(split(), whole)
        assert "all-" not in split.lower().compile().as_text()


def test_bfloat16_equals_the_oracle():
    x = draw((64, 64), -60, 60, signed=True)
    bits = bits_of(x.shape)
    numbers = reference.bfloat16_numbers()
    index = reference.round_at_random(abs(x), numbers, uniform_of(bits, 16))
    got = moments.round_to_bfloat16(jnp.array(x), bits)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float64(got), np.sign(x) * numbers[index])


def test_bfloat16_keeps_what_it_can_write():
    x = jnp.array([0.0, -1.5, 2.0**-126, jnp.inf], jnp.bfloat16)
    for step in range(20):
        got = moments.round_to_bfloat16(x.astype(jnp.float32), bits_of((4,), step))
        np.testing.assert_array_equal(got, x)


def quantized(x, step=0, dtype=jnp.int8):
    """With one scale of 1 for all, so that codes are of `x` itself."""
    scales = (jnp.ones((1,) * x.ndim),)
    return moments.quantize(jnp.array(x), scales, bits_of(x.shape, step), dtype)


@CODES
def test_eight_bits_equal_the_oracle(dtype):
    signed = dtype == jnp.int8
    x = draw((64, 64), -15 if signed else -31, 0, signed)
    got = quantized(x, dtype=dtype)
    numbers = reference.eight_bit_numbers(signed)
    bits = bits_of(x.shape)
    index = reference.round_at_random(abs(x), numbers, uniform_of(bits, 20))
    assert got.codes.dtype == dtype
    np.testing.assert_array_equal(got.codes, np.sign(x) * index)
    np.testing.assert_array_equal(moments.dequantize(got), np.sign(x) * numbers[index])
    assert abs(moments.dequantize(got) / x - 1).max() < 1 / 8


@CODES
def test_every_code_is_a_number_that_is_kept(dtype):
    signed = dtype == jnp.int8
    numbers = reference.eight_bit_numbers(signed).astype(np.float32)
    x = np.concatenate([-numbers[:0:-1], numbers]) if signed else numbers
    got = quantized(x, dtype=dtype)
    np.testing.assert_array_equal(moments.dequantize(got), x)
    assert len(np.unique(got.codes)) == (255 if signed else 256)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "uint8"])
def test_mean_of_many_roundings_is_the_number(kind):
    """Fails if rounding has a bias: to the nearest, towards zero or away from it."""
    num_steps = 2_000
    x = draw((32,), -18 if kind == "int8" else -14, 0, signed=kind != "uint8")

    def rounded(step):
        bits = moments.random_bits(x.shape, step, 3)
        if kind == "bfloat16":
            return moments.round_to_bfloat16(jnp.array(x), bits).astype(jnp.float32)
        scales = (jnp.ones((1,)),)
        got = moments.quantize(jnp.array(x), scales, bits, jnp.dtype(kind))
        return moments.dequantize(got)

    values = np.float64(jax.vmap(rounded)(jnp.arange(num_steps)))
    deviation = values.std(0) / np.sqrt(num_steps)
    assert (abs(values.mean(0) - x) <= 5 * deviation + 1e-7 * abs(x)).all()
    assert (values.std(0) > 0).mean() > 0.9


def test_signed_codes_go_on_below_their_range_and_unsigned_never_become_zero():
    tiny = np.full((4_000,), 2.0**-18, np.float32)
    signed = np.asarray(moments.dequantize(quantized(tiny)))
    smallest = reference.eight_bit_numbers(True)[1]
    assert set(signed) == {0.0, np.float32(smallest)}
    np.testing.assert_allclose(signed.mean(), 2.0**-18, rtol=0.1)
    for size in (2.0**-40, 1e-30):
        unsigned = quantized(np.full((100,), size, np.float32), dtype=jnp.uint8)
        assert set(np.asarray(unsigned.codes)) == {1}
    assert quantized(np.zeros((3,), np.float32), dtype=jnp.uint8).codes.max() == 0


def test_scale_is_the_smaller_of_row_and_column():
    """Each number is measured by its own row and column, and by no other layer."""
    rng = np.random.default_rng(4)
    rows, columns = 10.0 ** rng.uniform(-6, 0, (2, 2, 32))
    x = rng.normal(size=(2, 32, 32)) * rows[..., :, None] * columns[..., None, :]
    x = np.float32(x)
    scales = tuple(
        moments.measure(jnp.array(x), shape) for shape in [(2, 32, 1), (2, 1, 32)]
    )
    np.testing.assert_array_equal(scales[0], abs(x).max(2, keepdims=True))
    np.testing.assert_array_equal(scales[1], abs(x).max(1, keepdims=True))
    got = moments.quantize(jnp.array(x), scales, bits_of(x.shape), jnp.int8)
    smaller = np.minimum(abs(x).max(2, keepdims=True), abs(x).max(1, keepdims=True))
    relative = abs(np.asarray(moments.dequantize(got)) - x) / smaller
    assert relative.max() < 1 / 8
    kept = abs(x) > smaller * 2.0**-15
    assert (abs(moments.dequantize(got) / x - 1)[kept] < 1 / 8).all()
    assert kept.mean() > 0.9


def test_row_and_column_of_zeros_stay_zero():
    x = jnp.zeros((4, 4)).at[1:, 1:].set(1.0)
    scales = moments.measure(x, (4, 1)), moments.measure(x, (1, 4))
    got = moments.quantize(x, scales, bits_of(x.shape), jnp.uint8)
    np.testing.assert_array_equal(moments.dequantize(got), x)


@pytest.mark.parametrize("kind", ["bfloat16", "uint8"])
def test_slow_decay_stalls_to_the_nearest_and_not_at_random(kind):
    """A second moment under b2 = 0.999 without gradients, for 1,000 steps."""
    shape, decay, num_steps = (64, 64), np.float32(0.999), 1_000
    middle = jnp.full(shape, 1 << 31, jnp.uint32)  # rounds up from the middle on

    def step(value, count, bits):
        value = value * decay
        if kind == "bfloat16":
            return moments.round_to_bfloat16(value, bits).astype(jnp.float32)
        scales = (jnp.ones((1, 1)),)
        return moments.dequantize(moments.quantize(value, scales, bits, jnp.uint8))

    def nearest(value, count):
        return step(value, count, middle), None

    def at_random(value, count):
        return step(value, count, moments.random_bits(shape, count, 0)), None

    steps = jnp.arange(num_steps)
    stalled, _ = jax.jit(lambda x: jax.lax.scan(nearest, x, steps))(jnp.ones(shape))
    moved, _ = jax.jit(lambda x: jax.lax.scan(at_random, x, steps))(jnp.ones(shape))
    np.testing.assert_array_equal(stalled, 1.0)
    np.testing.assert_allclose(moved.mean(), 0.999**1_000, rtol=0.03)
