"""Attention of one token per row to a cache in pages: ours and cuDNN's, over a copy.

python examples/benchmarks/decode_attention.py [--quick] [--checks] [--sweep]
    [--only=ours,cudnn]

Each way attends layer by layer: the output is the next query, and layers have caches of
their own, more than the L2 cache holds. Times are medians over rounds in which all ways
take turns. Bytes are those of keys and values; the copy is one of 1 GiB. cuDNN reads a
contiguous cache, and one in pages where JAX has it. With `--only`, one side alone runs,
and its fastest way counts.

`--sweep` tries sizes of the kernel, and `--checks` compares outputs with the reference.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import call_timing
import jax
import jax.numpy as jnp
from jax import Array
from rich.console import Console
from rich.table import Table

from zjax_kernels import paged_attention
from zjax_kernels.decode import mosaic_gpu
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.decode.tuning import H200, Tuning

HEADS, KV_HEADS, SIZE, PAGE_SIZE = 32, 8, 128, 64
BATCHES, LENGTHS = (1, 8, 32, 128), (1024, 4096, 16384)
QUICK = ((1, 4096), (32, 4096), (128, 1024))
MAX_BYTES = 60e9
LAYERS_BYTES = 400e6
"""Bytes of the caches of all layers, at least, of which the L2 cache holds 50 MB."""
MIN_LAYERS, MAX_LAYERS = 2, 24
ROUNDS, ROUND_SECONDS = 9, 0.03
NUM_FLOATS = 2**28


@dataclasses.dataclass(frozen=True)
class Layers:
    """Caches of several layers, contiguous [B, S, KV, D] or in pages, and their rows.

    Args:
        q: [B, 1, H, D] the first query.
        caches: Keys and values of each layer.
        pages: int32[B, S / PAGE_SIZE], pages of rows in shuffled order.
        length: Tokens of each row.
    """

    q: Array
    caches: list[tuple[Array, Array]]
    pages: Array
    length: int


def num_layers(batch: int, length: int) -> int:
    layer = cache_bytes(batch, length)
    wanted = max(MIN_LAYERS, min(MAX_LAYERS, -int(-LAYERS_BYTES // layer)))
    return wanted if wanted * layer < MAX_BYTES else 1


def cache_bytes(batch: int, length: int) -> int:
    return 4 * batch * length * KV_HEADS * SIZE


def make_layers(batch: int, length: int, *, paged: bool) -> Layers:
    per_row = length // PAGE_SIZE
    shape = batch, length, KV_HEADS, SIZE
    if paged:
        shape = batch * per_row, KV_HEADS, PAGE_SIZE, SIZE
    keys = jax.random.split(jax.random.key(0), 2 * num_layers(batch, length) + 2)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    pools = [draw(key, shape, jnp.bfloat16) for key in keys[2:]]
    caches = list(zip(pools[::2], pools[1::2], strict=True))
    q = draw(keys[0], (batch, 1, HEADS, SIZE), jnp.bfloat16)
    pages = jax.random.permutation(keys[1], batch * per_row).reshape(batch, -1)
    return Layers(q, caches, pages.astype(jnp.int32), length)


def ours(q, keys, values, pages, length, implementation: Any = "mosaic_gpu"):
    starts = jnp.full(len(q), length - 1, jnp.int32)
    return paged_attention(
        q,
        keys,
        values,
        pages,
        starts,
        jnp.ones_like(starts),
        implementation=implementation,
    )


def tuned(q, keys, values, pages, length, *, tuning):
    """Ours with given sizes."""
    starts = jnp.full(len(q), length - 1, jnp.int32)
    cache = Cache(keys, values, pages, starts, jnp.ones_like(starts))
    options = Options(SIZE**-0.5, window=0, soft_cap=0.0, value_size=SIZE)
    return mosaic_gpu.paged_attention(q, cache, None, options, tuning=tuning)


def cudnn(q, keys, values, pages, length):
    lengths = jnp.full(len(q), length, jnp.int32)
    return jax.nn.dot_product_attention(
        q,
        keys,
        values,
        query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def cudnn_without_lengths(q, keys, values, pages, length):
    return jax.nn.dot_product_attention(q, keys, values, implementation="cudnn")


def cudnn_paged(q, keys, values, pages, length):
    """Pages of cuDNN, which wants as many as the rows have."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    lengths = jnp.full(len(q), length, jnp.int32)
    table = pages[:, None, :, None]
    # Pools are [N, KV, page size, D]: queries are [B, H, 1, D] in this layout.
    out: Any = fused.paged_attention(
        q.swapaxes(1, 2),
        keys,
        values,
        jnp.ones_like(lengths),
        lengths,
        table,
        table,
        scale=SIZE**-0.5,
        mask_type=fused.MaskType.PADDING,
        qkv_layout="BNTH",
    )
    out = out[0] if isinstance(out, tuple | list) else out
    return out.swapaxes(1, 2)


WAYS = {"ours": (ours, True)}
PEERS = {
    "cuDNN": (cudnn, False),
    "cuDNN, no lengths": (cudnn_without_lengths, False),
    "cuDNN, pages": (cudnn_paged, True),
}
"""Ways to attend, and whether the cache is in pages."""


def compile_layers(attend: Callable[..., Array], layers: Layers) -> tuple[Any, Any]:
    """A program of all layers, one after another, and what it takes."""
    layer = jax.jit(attend, static_argnums=4)  # traced once for all layers

    def run(q, caches, pages):
        for keys, values in caches:
            q = layer(q, keys, values, pages, layers.length)
        return q

    args = layers.q, layers.caches, layers.pages
    return jax.jit(run).lower(*args).compile(), args


def time_in_turn(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each call, over rounds in which all take turns."""
    found = time_rounds(calls)
    return {name: statistics.median(each) for name, each in found.items()}


def time_rounds(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of each call in each of several rounds, in which all take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        repeats[name] = 1 + int(ROUND_SECONDS / (time.perf_counter() - start))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            # Calls queue up, so that launches overlap with kernels.
            jax.block_until_ready([call() for _ in range(repeats[name])])
            seconds[name].append((time.perf_counter() - start) / repeats[name])
    return seconds


def copy_bandwidth() -> float:
    """Bytes per second of a copy."""
    numbers = jax.random.normal(jax.random.key(0), (NUM_FLOATS,), jnp.float32)
    copy = functools.partial(jax.jit(jnp.negative).lower(numbers).compile(), numbers)
    return 2 * numbers.nbytes / time_in_turn({"copy": copy})["copy"]


def compile_ways(ways, batch, length, failures):
    """Calls of the ways that this JAX and GPU can run."""
    kinds = {kind for _, kind in ways.values()}
    paged = {kind: make_layers(batch, length, paged=kind) for kind in kinds}
    calls = {}
    for name, (attend, kind) in ways.items():
        try:
            compiled, args = compile_layers(attend, paged[kind])
            call = functools.partial(compiled, *args)
            jax.block_until_ready(call())
        except Exception as error:
            failures[name] = str(error).strip().splitlines()[:3]
        else:
            calls[name] = call
    return calls


def rate(seconds: float, batch: int, length: int) -> tuple[float, float]:
    """Seconds per layer, and bytes of keys and values per second."""
    seconds /= num_layers(batch, length)
    return seconds, cache_bytes(batch, length) / seconds


def compare(ways, shapes, copy: float) -> dict[str, Any]:
    """Prints the time of each way; returns the bytes per second of the fastest."""
    table, failures = Table("rows", "tokens", *ways, "of best cuDNN"), {}
    metrics = {}
    for batch, length in shapes:
        rounds = time_rounds(compile_ways(ways, batch, length, failures))
        found = {name: statistics.median(each) for name, each in rounds.items()}
        if found:
            best = rounds[min(found, key=lambda name: found[name])]
            num_bytes = cache_bytes(batch, length) * num_layers(batch, length)
            metrics[metric_of(batch, length)] = call_timing.rates(num_bytes, best)
        cells = []
        for name in ways:
            if name not in found:
                cells.append("-")
                continue
            seconds, speed = rate(found[name], batch, length)
            cells.append(f"{seconds * 1e6:.1f} us, {speed / copy:.1%}")
        peers = [found[name] for name in found if name in PEERS]
        best = f"{min(peers) / found['ours']:.2f}" if peers and "ours" in found else "-"
        table.add_row(str(batch), str(length), *cells, best)
    console = Console(width=160)
    console.print(table)
    for name, lines in failures.items():
        console.print(f"{name} does not run:", *lines, markup=False)
    return metrics


def metric_of(batch: int, length: int) -> str:
    """Name of the bytes per second of a shape."""
    return f"{batch} x {length} bytes/s"


def sweep(shapes, copy: float) -> None:
    """Prints the bandwidth over a copy's of several sizes of the kernel."""
    shipped = H200[SIZE]
    each = itertools.product((3, 6), (1, 2, 4, 8), (2, 4, 8))
    tunings = [shipped, *(Tuning(*sizes) for sizes in each)]
    for batch, length in shapes:
        ways = {
            str(tuning): (functools.partial(tuned, tuning=tuning), True)
            for tuning in tunings
        }
        found = time_in_turn(compile_ways(ways, batch, length, {}))
        print(f"{batch} rows of {length}")
        for name in sorted(found, key=lambda name: found[name])[:8]:
            seconds, speed = rate(found[name], batch, length)
            print(f"  {seconds * 1e6:8.1f} us, {speed / copy:.1%}: {name}")
        if (name := str(shipped)) in found:
            print(f"  shipped {rate(found[name], batch, length)[0] * 1e6:.1f} us")


def check(shapes) -> None:
    """Prints the largest difference to the reference, and the operations of a layer."""
    for batch, length in shapes:
        layers = make_layers(batch, length, paged=True)
        layers = dataclasses.replace(layers, caches=layers.caches[:1])
        compiled, args = compile_layers(ours, layers)
        expected, _ = compile_layers(
            functools.partial(ours, implementation="reference"), layers
        )
        found, expected = (
            run(*args).astype(jnp.float32) for run in (compiled, expected)
        )
        error = jnp.abs(found - expected).max() / jnp.abs(expected).max()
        print(f"{batch} rows of {length}: largest error {error:.2e} of the largest")
        text = compiled.as_text()
        entry = text[text.index("ENTRY") :].splitlines()
        print(*(f"  {x.strip()[:140]}" for x in entry if " = " in x), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", choices=("ours", "cudnn"), help="one side alone")
    given = parser.parse_args()
    shapes = [
        shape
        for shape in (QUICK if given.quick else itertools.product(BATCHES, LENGTHS))
        if cache_bytes(*shape) < MAX_BYTES
    ]
    if given.checks:
        check(shapes)
    copy = copy_bandwidth()
    device = jax.devices()[0].device_kind
    print(f"{device}: a copy at {copy / 1e12:.2f} TB/s")
    if given.sweep:
        sweep(shapes, copy)
        return
    ways = {"ours": WAYS, "cudnn": PEERS, None: WAYS | PEERS}[given.only]
    metrics = compare(ways, shapes, copy)
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
