"""Products of few rows, as in decoding: ours with 16, 8 and 4 bits, and XLA's.

python examples/benchmarks/few_rows_products.py [--quick] [--sweep]

One program multiplies by several matrices in turn, of more bytes than the L2 cache
holds, and does so many times: the next rows depend on the last result. Times are
medians over rounds in which all ways take turns, with the small operation between two
products. The ways are XLA's product of 16 bits, and what a decoder computes for this
number of rows with weights of each kind (`zjax.ops.narrow`).

`--sweep` tries sizes of the kernel instead.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from decode_attention import time_in_turn
from jax import Array, lax
from rich.console import Console
from rich.table import Table

from zjax.ops import narrow
from zjax_kernels import few_rows_matmul
from zjax_kernels.decode.product import mosaic_gpu
from zjax_kernels.decode.product.reference import Operands, Options
from zjax_kernels.decode.product.tuning import Tuning, choose, num_bits, num_stages
from zjax_kernels.device import NUM_SMS

SHAPES = (4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096)
"""Inputs and outputs of the matrices of a block of Llama 7B."""
ROWS = 1, 8, 64, 128, 256, 576
QUICK = SHAPES[:1], (1, 128)
MATRICES_BYTES = 400e6
"""Bytes of all matrices of a program, at least, of which the L2 cache holds 50 MB."""
NUM_REPEATS = 10
"""Times that a program goes through all matrices."""


def make_matrices(kind: str, depth: int, columns: int) -> list[Any]:
    """Matrices of a kind."""
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    lay = jax.jit(narrow.quantize, static_argnums=1)
    number = max(2, -int(-MATRICES_BYTES // (depth * columns)))
    keys = jax.random.split(jax.random.key(0), number)
    matrices = []
    for key in keys:
        plain = draw(key, (depth, columns), jnp.bfloat16) * jnp.bfloat16(depth**-0.5)
        matrices.append(plain if kind == "compute" else lay(plain, kind))
    return matrices


def xla(x: Array, matrix: Array) -> Array:
    return x @ matrix


def multiply(x: Array, matrix: Any) -> Array:
    """What decoders do."""
    if isinstance(matrix, narrow.Codes):
        return narrow.multiply(x, matrix)
    return few_rows_matmul(x, matrix, early=True)


def tuned(x: Array, matrix: Any, *, tuning: Tuning) -> Array:
    """Ours with given sizes."""
    operands = Operands(x, *(matrix if isinstance(matrix, narrow.Codes) else (matrix,)))
    return mosaic_gpu.few_rows_matmul(operands, Options(early=True), tuning=tuning)


def make_call(way: Callable[..., Array], rows: int, matrices: list[Any]):
    """A call of a program of products, one after another."""
    first = matrices[0]
    depth = first[0].shape[1] if isinstance(first, narrow.Codes) else len(first)
    x = jax.random.normal(jax.random.key(1), (rows, depth), jnp.bfloat16)
    product = jax.jit(way)  # traced once for all matrices

    def follow(x, matrix):
        """The next rows depend on a result, which is computed as a whole."""
        out = lax.optimization_barrier(product(x, matrix))
        return (x + out[:, :1]) * jnp.bfloat16(0.5)

    def run(x, matrices):
        def through_all(_, x):
            return functools.reduce(follow, matrices, x)

        return lax.fori_loop(0, NUM_REPEATS, through_all, x)

    compiled = jax.jit(run).lower(x, matrices).compile()
    return functools.partial(compiled, x, matrices)


def time_ways(ways: dict[str, tuple[Any, list[Any]]], rows: int) -> dict[str, float]:
    """Seconds of a product, of each way that runs."""
    calls = {}
    for name, (way, matrices) in ways.items():
        try:
            calls[name] = make_call(way, rows, matrices)
            jax.block_until_ready(calls[name]())
        except Exception as error:
            calls.pop(name, None)
            print(f"{name} does not run:", *str(error).strip().splitlines()[:3])
    found = time_in_turn(calls)
    return {x: found[x] / NUM_REPEATS / len(ways[x][1]) for x in found}


def compare(shapes: Any, all_rows: Any) -> None:
    """Prints the time of all ways, and the time of XLA's product over each."""
    kinds = narrow.WEIGHT_DTYPES
    table = Table("K x M", "rows", "XLA", *kinds)
    for depth, columns in shapes:
        matrices = {kind: make_matrices(kind, depth, columns) for kind in kinds}
        ways = {"XLA": (xla, matrices["compute"])}
        ways |= {kind: (multiply, matrices[kind]) for kind in kinds}
        for rows in all_rows:
            found = time_ways(ways, rows)
            cells = [
                f"{found[x] * 1e6:.1f} us, {found['XLA'] / found[x]:.2f}"
                if x in found
                else "-"
                for x in ways
            ]
            table.add_row(f"{depth} x {columns}", str(rows), *cells)
    Console(width=120).print(table)


def tunings(rows: int, depth: int, columns: int, dtype: Any) -> list[Tuning]:
    """Sizes of the kernel that may be fast: most of the GPU is busy, in one wave."""
    found = [choose(rows, depth, columns, dtype=dtype)]
    widths = (64, 128, 256) if dtype == jnp.bfloat16 else (64, 128)
    for width, splits in itertools.product(widths, (1, 2, 3, 4, 5, 8)):
        if columns % width:
            continue
        programs = columns // width * splits
        per_sm = min(3, -(-programs // NUM_SMS))
        for sharing in {per_sm, min(3, per_sm + 1)}:
            stages = num_stages(rows, width, splits, sharing, dtype=dtype)
            is_wave = programs <= sharing * NUM_SMS or splits == 1
            if is_wave and programs > 60 and stages > 2:
                found.append(Tuning(width, splits, stages))
    return list(dict.fromkeys(found))


def sweep(shapes: Any, all_rows: Any) -> None:
    """Prints the times of several sizes of the kernel, the fastest first."""
    kinds = {"compute": jnp.bfloat16, "int8": jnp.int8, "int4": jnp.int4}
    pairs: Any = itertools.product(kinds.items(), shapes)
    for (kind, dtype), (depth, columns) in pairs:
        matrices = make_matrices(kind, depth, columns)
        for rows in (x for x in all_rows if x <= 64):
            ways = {
                str(each): (functools.partial(tuned, tuning=each), matrices)
                for each in tunings(rows, depth, columns, dtype)
            }
            found = time_ways(ways, rows)
            print(f"{rows} rows, {depth} x {columns}, {kind}")
            num_bytes = num_bits(dtype) * depth * columns // 8
            for name in sorted(found, key=lambda name: found[name])[:6]:
                rate = num_bytes / found[name] / 1e12
                print(f"   {found[name] * 1e6:.1f} us, {rate:.2f} TB/s {name}")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    (sweep if given.sweep else compare)(*(QUICK if given.quick else (SHAPES, ROWS)))


if __name__ == "__main__":
    main()
