"""Dtypes of a run, and the line that names them."""

import jax
import jax.numpy as jnp
import pytest

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
