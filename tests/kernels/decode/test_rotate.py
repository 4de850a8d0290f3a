"""Rotation and writes of decoded tokens: NumPy, the GPU kernel, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.interpreter import InterpretGPUParams
from tests.support.refusals import value_error
from zjax_kernels import rotate_and_write
from zjax_kernels.decode.rotate import mosaic_gpu
from zjax_kernels.decode.rotate.reference import Operands, Options
from zjax_kernels.warpgroups import HAS_EARLY_START

EPS = 0.1
CASES = {
    "groups, all channels rotate": dict(heads=8, num_heads=4, size=64, half=32),
    "norms and a bias, heads that programs do not share out": dict(
        heads=14, num_heads=2, size=64, half=32, has_norms=True, has_bias=True
    ),
    "half of the channels, norms and a scale": dict(
        heads=4, num_heads=1, size=128, half=32, has_norms=True, scale=0.5
    ),
    "no rotation, heads without groups": dict(
        heads=4, num_heads=4, size=64, half=0, has_bias=True, dtype=jnp.float16
    ),
    "wide heads, one of keys": dict(heads=3, num_heads=1, size=256, half=128),
    "pages in float8, some numbers beyond its largest": dict(
        heads=6,
        num_heads=2,
        size=64,
        half=32,
        has_bias=True,
        page_dtype=jnp.float8_e4m3fn,
        magnitude=200.0,
    ),
    "pages in float8, norms": dict(
        heads=4,
        num_heads=2,
        size=128,
        half=32,
        has_norms=True,
        dtype=jnp.float16,
        page_dtype=jnp.float8_e4m3fn,
    ),
}


def make_case(
    *,
    heads,
    num_heads,
    size,
    half,
    has_norms=False,
    has_bias=False,
    scale=1.0,
    dtype=jnp.bfloat16,
    page_dtype=None,
    magnitude=1.0,
    num_tokens=4,
    page_size=16,
):
    """Arguments of a call; the second token is not written, the third ends a page."""
    rng, num_pages = np.random.default_rng(0), 3

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    width = (heads + 2 * num_heads) * size
    pool = 1 + num_tokens * num_pages, num_heads, page_size, size
    pages = 1 + rng.permutation(num_tokens * num_pages).reshape(num_tokens, -1)
    starts = rng.integers(0, num_pages * page_size, num_tokens)
    starts[2:4] = 2 * page_size - 1, page_size
    counts = np.ones(num_tokens)
    counts[1] = 0
    angles = rng.normal(size=(num_tokens, half))
    settings = dict(
        bias=draw(width) if has_bias else None,
        norms=(draw(size), draw(size), EPS) if has_norms else None,
        rotation=(np.float32(np.cos(angles)), np.float32(np.sin(angles))),
        query_scale=scale,
    )
    if not half:
        settings["rotation"] = None
    places = map(np.int32, (pages, starts, counts))
    pools = [draw(*pool).astype(page_dtype or dtype) for _ in range(2)]
    return (draw(num_tokens, width) * magnitude, *pools, *places), settings


def rotated(product, keys, values, pages, starts, counts, settings):
    """What the call makes in NumPy, one head of a token at a time."""
    largest = float(jnp.finfo(keys.dtype).max)
    product, keys, values = (np.array(x, np.float64) for x in (product, keys, values))
    _, num_heads, page_size, size = keys.shape
    heads = product.shape[1] // size - 2 * num_heads
    q = np.zeros((len(product), 1, heads, size))
    for token, row in enumerate(product):
        if settings["bias"] is not None:
            row = row + np.float64(settings["bias"])
        page, slot = pages[token, starts[token] // page_size], starts[token] % page_size
        for number, head in enumerate(row.reshape(-1, size)):
            is_query, is_value = number < heads, number >= heads + num_heads
            if settings["norms"] is not None and not is_value:
                norm = np.float64(settings["norms"][0 if is_query else 1])
                head = head / np.sqrt(np.square(head).mean() + EPS) * norm
            if settings["rotation"] is not None and not is_value:
                cos, sin = (np.float64(x[token]) for x in settings["rotation"])
                half = len(cos)
                x, y, others = np.split(head, (half, 2 * half))
                head = np.concatenate([x * cos - y * sin, y * cos + x * sin, others])
            if is_query:
                q[token, 0, number] = head * settings["query_scale"]
            elif counts[token]:
                pool = values if is_value else keys
                head = np.clip(head, -largest, largest)
                pool[page, (number - heads) % num_heads, slot] = head
    return q, keys, values


def assert_rotated(found, arrays, settings, dtype):
    """Compares in the precision of a dtype; other places of the pools are as before."""
    expected = rotated(*arrays, settings)
    dtypes = dtype, arrays[1].dtype, arrays[2].dtype
    for one, other, each in zip(found, expected, dtypes, strict=True):
        assert one.dtype == each and one.shape == other.shape
        eps = 4 * float(jnp.finfo(dtype).eps)
        least = eps * np.abs(np.float64(arrays[0])).max()
        if each != dtype:
            # Half a step, of normal numbers and of numbers near 0.
            eps, least = eps + 2.0**-4, least + 2.0**-10
        np.testing.assert_allclose(np.float64(one), other, rtol=eps, atol=least)


@pytest.mark.parametrize("name", CASES)
def test_reference_rotates_and_writes(name):
    case = CASES[name] | {"dtype": jnp.float32}
    arrays, settings = make_case(**case)
    found = jax.jit(functools.partial(rotate_and_write, **settings))(*arrays)
    assert_rotated(found, arrays, settings, jnp.float32)


@pytest.mark.parametrize("name", CASES)
def test_kernel_rotates_and_writes(capfd, name):
    """Fails if the kernel leaves out, mixes up or races for anything."""
    arrays, settings = make_case(**CASES[name])
    product, keys, values, *places = arrays
    norms, bias = settings["norms"], settings["bias"]
    by_head = -1, keys.shape[3]
    operands = Operands(
        product.reshape(len(product), *by_head),
        None if bias is None else bias.reshape(by_head),
        None if norms is None else norms[:2],
        settings["rotation"],
        *places,
    )
    num_heads = operands.product.shape[1] - 2 * keys.shape[1]
    options = Options(num_heads, EPS, settings["query_scale"])
    run = functools.partial(
        mosaic_gpu.rotate_and_write,
        options=options,
        interpret=InterpretGPUParams(detect_races=True),
    )
    found = jax.jit(run)(operands, keys, values)
    assert_rotated(found, arrays, settings, product.dtype)
    assert "RACE" not in "".join(capfd.readouterr())


def lowered(case, *, in_loop=False, **given):
    """The program of a call for CUDA, which donates the pools."""
    arrays, settings = make_case(**case)
    settings |= {"implementation": "mosaic_gpu"} | given
    call = functools.partial(rotate_and_write, **settings)

    def run(product, keys, values, *places):
        def step(_, pools):
            return call(product, *pools, *places)[1:]

        if in_loop:
            return jax.lax.fori_loop(0, 3, step, (keys, values))
        return call(product, keys, values, *places)

    traced = jax.jit(run, donate_argnums=(1, 2)).trace(*arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("num_tokens", [4, 64])
@pytest.mark.parametrize("name", CASES)
def test_every_variant_is_one_kernel_on_cuda(on_hopper, name, num_tokens):
    """Fails if Mosaic cannot lower a call, or anything happens outside of the kernel.

    Small arrays of the call are constants, and others are reshaped in place.
    """
    text = lowered(CASES[name] | {"num_tokens": num_tokens})
    found = re.findall(r"= stablehlo\.(\w+)", text)
    assert found.count("custom_call") == 1
    assert set(found) <= {"custom_call", "constant", "reshape"}


@pytest.mark.parametrize("in_loop", [False, True])
def test_pools_are_written_in_place(on_hopper, in_loop):
    """Fails if the kernel makes new pools."""
    text = lowered(CASES["groups, all channels rotate"], in_loop=in_loop)
    assert len(re.findall(r"output_operand_alias<", text)) == 2


@pytest.mark.parametrize("early", [False, True])
def test_early_kernels_wait_for_the_kernels_before(on_hopper, early):
    """Fails if a kernel never starts early, or starts so without being asked."""
    text = lowered(CASES["groups, all channels rotate"], early=early)
    assert ("griddepcontrol.wait" in text) == (early and HAS_EARLY_START)


def test_arrays_that_do_not_fit():
    (product, keys, values, pages, starts, counts), settings = make_case(
        heads=4, num_heads=2, size=64, half=32, has_norms=True, has_bias=True
    )
    with value_error(
        "product.shape=(512,) does not have 2 dims; give [N, (H + 2 KV) D]\n"
        "keys.shape=(13, 2, 16, 64) does not fit values of shape (2, 16, 64); give two "
        "[pages, KV, page size, D]"
    ):
        rotate_and_write(product[0], keys, values[0], pages, starts, counts)
    with value_error(
        "product.shape=(4, 256) does not hold queries beside 2 keys and values of 64 "
        "channels; give [N, (H + 2 KV) D]\n"
        "pages.shape=(3,) does not fit 4 tokens; give [N, P]\n"
        "starts.shape=(1,) does not fit 4 tokens; give [N]\n"
        "counts.dtype=float32 is not of integers; use int32"
    ):
        few = pages[0], starts[:1], np.float32(counts)
        rotate_and_write(product[:, :256], keys, values, *few)
    cos, sin = settings["rotation"]
    with value_error(
        "norms[2]=-1 is below 0; use 1e-5\n"
        "bias.shape=(64,) does not fit 4 tokens of 512 columns, 64 for each head; give "
        "(512,)\n"
        "norms[1].shape=(32,) does not fit 4 tokens of 512 columns, 64 for each head; "
        "give (64,)\n"
        "rotation[0].shape=(3, 32) does not fit 4 tokens of 512 columns, 64 for each "
        "head; give (4, 32)\n"
        "rotation[1].shape=(4, 64) does not fit 4 tokens of 512 columns, 64 for each "
        "head; give (4, 32)"
    ):
        rotate_and_write(
            product,
            keys,
            values,
            *(pages, starts, counts),
            bias=settings["bias"][:64],
            norms=(settings["norms"][0], settings["norms"][1][:32], -1),
            rotation=(cos[:3], np.tile(sin, 2)),
        )


REFUSED = {
    "arrays of float32": (
        dict(heads=2, num_heads=1, size=64, half=32, dtype=jnp.float32),
        "it needs bfloat16 or float16 and the arrays are float32; cast them",
    ),
    "heads of 32 channels": (
        dict(heads=2, num_heads=1, size=32, half=16),
        "it needs heads of 64, 128, 256 channels, not 32; pad the heads",
    ),
    "few rotated channels": (
        dict(heads=2, num_heads=1, size=64, half=16),
        "it needs a multiple of 32 rotated pairs, not 16; pad the heads",
    ),
    "few heads": (
        dict(heads=1, num_heads=1, size=64, half=32),
        "it needs 4 heads or more, not 3; use more",
    ),
}


@pytest.mark.parametrize(("case", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_refuses(on_hopper, case, message):
    arrays, settings = make_case(**case)
    with value_error(
        f"implementation=mosaic_gpu cannot run: {message}, or use "
        "implementation='reference'"
    ):
        rotate_and_write(*arrays, implementation="mosaic_gpu", **settings)
    found = rotate_and_write(*arrays, **settings)
    assert_rotated(found, arrays, settings, arrays[0].dtype)
