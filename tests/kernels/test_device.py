"""What runs where: said once, or refused with the reason."""

import logging

import pytest

from tests.support.refusals import value_error
from zjax_kernels import device

H200 = ("cuda", (9, 0))


@pytest.fixture
def on(monkeypatch):
    return lambda found: monkeypatch.setattr(device, "first_device", lambda: found)


def choose(requested, dtype="bfloat16", head_size=128):
    return device.check_implementation(requested, dtype=dtype, head_size=head_size)


def test_auto_takes_the_kernels_where_they_run(on):
    on(H200)
    assert choose("auto") == "mosaic_gpu"
    assert choose("auto", dtype="float32") == "reference"
    assert choose("auto", head_size=80) == "reference"
    assert choose("reference") == "reference"
    for found in (
        ("cpu", (0, 0)),
        ("cuda", (8, 0)),
        ("cuda", (10, 0)),
        ("tpu", (0, 0)),
    ):
        on(found)
        assert choose("auto") == "reference"


def test_auto_says_once_what_it_took(on, caplog):
    """Fails if a slow path is taken in silence, or if every layer says so."""
    on(("cuda", (8, 0)))
    device._log_choice.cache_clear()
    with caplog.at_level(logging.WARNING, logger="zjax_kernels"):
        choose("auto")
        choose("auto")
    assert caplog.messages == [
        "sparse attention: reference (it needs compute capability 9.0 and this GPU has "
        "8.0)"
    ]


@pytest.mark.parametrize(
    ("found", "dtype", "head_size", "error", "message"),
    [
        (
            ("cpu", (0, 0)),
            "bfloat16",
            128,
            NotImplementedError,
            "implementation=mosaic_gpu cannot run: it needs a Hopper GPU and this is "
            "cpu; use an H100 or H200, or use implementation='reference'",
        ),
        (
            ("cuda", (10, 0)),
            "bfloat16",
            128,
            NotImplementedError,
            "implementation=mosaic_gpu cannot run: it needs compute capability 9.0 and "
            "this GPU has 10.0; use an H100 or H200, or use implementation='reference'",
        ),
        (
            H200,
            "float32",
            128,
            ValueError,
            "implementation=mosaic_gpu cannot run: it needs bfloat16 or float16 and "
            "the arrays are float32; cast them, or use implementation='reference'",
        ),
        (
            H200,
            "float16",
            80,
            ValueError,
            "implementation=mosaic_gpu cannot run: it needs a head size of 64, 96, "
            "128, 256 and this is 80; pad the heads, or use implementation='reference'",
        ),
    ],
)
def test_what_cannot_run_is_refused(on, found, dtype, head_size, error, message):
    on(found)
    with pytest.raises(error) as caught:
        choose("mosaic_gpu", dtype=dtype, head_size=head_size)
    assert str(caught.value) == message


def test_an_unknown_implementation():
    with value_error(
        "implementation=triton is not an implementation; use auto, mosaic_gpu or "
        "reference"
    ):
        choose("triton")
