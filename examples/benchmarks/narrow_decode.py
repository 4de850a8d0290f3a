"""Products of few rows, as in decoding: ours and XLA's, over a copy.

python examples/benchmarks/narrow_decode.py [--quick] [--checks] [--sweep] [--codes]
python examples/benchmarks/narrow_decode.py --blocks

A program multiplies by several matrices in turn, more bytes than the L2 cache holds.
Between two products a small operation makes the next rows depend on the last result;
the time of a program of such operations alone is subtracted. Times are medians over
rounds in which all ways take turns. Bytes are those of the weights; the copy is one of
1 GiB.

`--sweep` tries sizes of the kernel, and `--checks` compares with sums in float32.
`--codes` times weights of 8 and 4 bits beside those of 16, or tries sizes for them.
`--blocks` times products of blocks of a 7B Llama, with norms, gates and residuals.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from decode_attention import copy_bandwidth, time_in_turn
from jax import Array, lax
from rich.console import Console
from rich.table import Table

from zjax_kernels import few_rows_matmul, rms_norm
from zjax_kernels.decode.product import mosaic_gpu
from zjax_kernels.decode.product.reference import Operands, Options
from zjax_kernels.decode.product.tuning import Tuning, choose, num_bits, num_stages
from zjax_kernels.device import NUM_SMS

SHAPES = (
    (4096, 12288),
    (4096, 4096),
    (4096, 22016),
    (11008, 4096),
    (4096, 128256),
    (1600, 4800),
    (1600, 8704),
    (4352, 1600),
)
ROWS = (1, 8, 16, 64)
BLOCK_SHAPES = (4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096)
BLOCK_DTYPES = jnp.bfloat16, jnp.int8, jnp.int4
EPS = 1e-5
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""Kernels start early by the stream that they are launched to."""
QUICK = ((4096, 12288), (4096, 4096), (11008, 4096)), (1, 16)
LAYERS_BYTES = 400e6
"""Bytes of all matrices of a program, at least, of which the L2 cache holds 50 MB."""
MIN_LAYERS, MAX_LAYERS, MAX_CODE_LAYERS = 2, 24, 12
GROUP = 128
"""Inputs that share a scale."""


def num_layers(depth: int, columns: int) -> int:
    wanted = -int(-LAYERS_BYTES // (2 * depth * columns))
    return max(MIN_LAYERS, min(MAX_LAYERS, wanted))


def make_weights(depth: int, columns: int) -> list[Array]:
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(0), num_layers(depth, columns))
    return [
        draw(key, (depth, columns), jnp.bfloat16) * jnp.bfloat16(depth**-0.5)
        for key in keys
    ]


def make_rows(rows: int, depth: int) -> Array:
    return jax.random.normal(jax.random.key(1), (rows, depth), jnp.bfloat16)


def depth_of(weights: Any) -> int:
    """Inputs of a matrix, or of codes and scales."""
    return weights[0].shape[1] if isinstance(weights, tuple) else weights.shape[0]


def columns_of(weights: Any) -> int:
    """Outputs of a matrix, or of codes and scales."""
    return weights[0].shape[0] if isinstance(weights, tuple) else weights.shape[1]


def xla(x, weights):
    return x @ weights


ours = functools.partial(few_rows_matmul, implementation="mosaic_gpu")


def ours_of_codes(x, weights):
    codes, scales = weights
    return ours(x, codes, scales=scales)


def tuned(x, weights, *, tuning):
    """Ours with given sizes."""
    codes, scales = weights if isinstance(weights, tuple) else (weights, None)
    operands = Operands(x, codes, scales)
    return mosaic_gpu.few_rows_matmul(operands, Options(), tuning=tuning)


def follow(x: Array, out: Array) -> Array:
    """The next rows, which depend on a result; the result is computed as a whole."""
    x, out = lax.optimization_barrier((x, out))
    return lax.optimization_barrier((x + out[:, :1]) * jnp.bfloat16(0.5))


def compile_layers(multiply: Callable[..., Array], x: Array, weights: list[Any]):
    """A call of a program of all layers, one after another."""
    layer = jax.jit(multiply)  # traced once for all layers

    def run(x, weights):
        for each in weights:
            x = follow(x, layer(x, each))
        return x

    return functools.partial(jax.jit(run).lower(x, weights).compile(), x, weights)


def compile_rest(x: Array, weights: list[Any]) -> Callable[[], Array]:
    """A call of a program of what is between the products."""
    outs = [jnp.ones((len(x), columns_of(each)), x.dtype) for each in weights]

    def run(x, outs):
        for out in outs:
            x = follow(x, out)
        return x

    return functools.partial(jax.jit(run).lower(x, outs).compile(), x, outs)


def time_ways(ways, rows: int, weights: list[Any]) -> dict[str, float]:
    """Seconds of a product, of each way that runs."""
    x = make_rows(rows, depth_of(weights[0]))
    calls: dict[str, Callable[[], Any]] = {"rest": compile_rest(x, weights)}
    for name, multiply in ways.items():
        try:
            calls[name] = compile_layers(multiply, x, weights)
            jax.block_until_ready(calls[name]())
        except Exception as error:
            calls.pop(name, None)
            print(f"{name} does not run:", *str(error).strip().splitlines()[:3])
    found = time_in_turn(calls)
    rest = found.pop("rest")
    return {name: (each - rest) / len(weights) for name, each in found.items()}


def compare(shapes, all_rows, copy: float) -> None:
    """Prints the time of both ways, the bandwidth over a copy's, and the ratio."""
    table = Table("K x M", "rows", "ours", "XLA", "XLA / ours", "tuning")
    for depth, columns in shapes:
        weights = make_weights(depth, columns)
        for rows in all_rows:
            found = time_ways({"ours": ours, "XLA": xla}, rows, weights)
            cells = [show(each, weights[0].nbytes, copy) for each in found.values()]
            ratio = f"{found['XLA'] / found['ours']:.2f}" if len(found) > 1 else "-"
            tuning = str(choose(rows, depth, columns))
            table.add_row(f"{depth} x {columns}", str(rows), *cells, ratio, tuning)
    Console(width=160).print(table)


def make_codes(dtype: Any, depth: int, columns: int) -> list[tuple[Array, Array]]:
    """Codes and scales of groups, transposed as the kernel takes them."""
    bits = jax.random.bits(jax.random.key(0), (columns, depth), jnp.uint8)
    codes = lax.bitcast_convert_type(bits, jnp.int8)
    shift = 8 - jnp.iinfo(dtype).bits
    scales = jnp.full((depth // GROUP, columns), depth**-0.5 / 100, jnp.bfloat16)
    layers = max(2, min(MAX_CODE_LAYERS, int(LAYERS_BYTES // (depth * columns))))
    return [((codes + n >> shift).astype(dtype), scales) for n in range(layers)]


def make_of(dtype: Any, depth: int, columns: int) -> list[Any]:
    """Weights of 16 bits, or codes."""
    if dtype == jnp.bfloat16:
        return make_weights(depth, columns)
    return make_codes(dtype, depth, columns)


def compare_codes(shapes, all_rows, copy: float) -> None:
    """Prints the time of weights of 16, 8 and 4 bits, and the ratio to 16."""
    table = Table("K x M", "rows", "16 bits", "8 bits", "4 bits", "16 / 8", "16 / 4")
    for (depth, columns), rows in itertools.product(shapes, all_rows):
        if depth % 256:
            continue
        weights = make_weights(depth, columns)
        found = [time_ways({"ours": ours}, rows, weights)["ours"]]
        cells = [show(found[0], weights[0].nbytes, copy)]
        for dtype, share in ((jnp.int8, 2), (jnp.int4, 4)):
            codes = make_codes(dtype, depth, columns)
            times = time_ways({"ours": ours_of_codes}, rows, codes)
            found.append(times.get("ours", float("nan")))
            cells.append(show(found[-1], weights[0].nbytes // share, copy))
        ratios = [f"{found[0] / each:.2f}" for each in found[1:]]
        table.add_row(f"{depth} x {columns}", str(rows), *cells, *ratios)
    Console(width=160).print(table)


def block(x, weights, multiply):
    """The products of a block of Llama; attention is a slice."""
    qkv, out, gate_up, down, norm = weights
    attended = multiply(x, qkv, norm=(norm, EPS))[:, : x.shape[1]]
    x = multiply(attended, out, residual=x)
    hidden = multiply(x, gate_up, norm=(norm, EPS), activation="swiglu")
    return multiply(hidden, down, residual=x)


def fused(x, weights, **settings):
    if isinstance(weights, tuple):
        weights, settings["scales"] = weights
    return ours(x, weights, **settings)


def early(x, weights, **settings):
    return fused(x, weights, early=True, **settings)


def unfused(x, weights, *, norm=None, activation="", residual=None):
    """What XLA makes of the operations."""
    if norm is not None:
        x = rms_norm(x, norm[0], eps=norm[1], implementation="reference")
    x = x @ weights
    if activation:
        gate, up = jnp.split(x, 2, axis=1)
        x = jax.nn.silu(gate) * up
    return x if residual is None else x + residual


def make_block(dtype: Any) -> list[tuple[Any, ...]]:
    """Weights of some blocks."""
    depth = BLOCK_SHAPES[0][0]
    products = [make_of(dtype, *shape)[:2] for shape in BLOCK_SHAPES]
    blocks = list(zip(*products, strict=True))
    return [(*each, jnp.ones(depth, jnp.bfloat16)) for each in blocks]


def compare_blocks(all_rows, copy: float) -> None:
    """Prints the time of the products of a block, and the bandwidth over a copy's."""
    names = [dtype.__name__ for dtype in BLOCK_DTYPES]
    weights = {dtype.__name__: make_block(dtype) for dtype in BLOCK_DTYPES}
    ways: dict[str, Any] = {"XLA": (unfused, names[0], None)}
    for name in names:
        ways[name] = fused, name, None
        ways[f"{name}, early"] = early, name, None
        ways[f"{name}, early, no graphs"] = early, name, NO_GRAPHS
    cells: dict[str, list[str]] = {label: [] for label in ways}
    for rows in all_rows:
        x = make_rows(rows, BLOCK_SHAPES[0][0])
        calls = {
            label: compile_blocks(way, x, weights[name], options)
            for label, (way, name, options) in ways.items()
        }
        for label, seconds in time_in_turn(calls).items():
            name = ways[label][1]
            seconds /= len(weights[name])
            cells[label].append(show(seconds, block_bytes(name), copy))
    table = Table("way", *map(str, all_rows))
    for label, shown in cells.items():
        table.add_row(label, *shown)
    Console(width=160).print(table)


def block_bytes(name: str) -> int:
    bits = {"int8": 8, "int4": 4}.get(name, 16)
    return sum(bits * depth * columns // 8 for depth, columns in BLOCK_SHAPES)


def compile_blocks(multiply, x, blocks, options):
    """A call of a program of all blocks, one after another."""

    def run(x, blocks):
        for each in blocks:
            x = block(x, each, multiply)
        return x

    compiled = jax.jit(run).lower(x, blocks).compile(compiler_options=options)
    return functools.partial(compiled, x, blocks)


def show(seconds: float, num_bytes: int, copy: float) -> str:
    return f"{seconds * 1e6:.1f} us, {num_bytes / seconds / copy:.1%}"


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


def sweep(shapes, all_rows, copy: float, dtype: Any) -> None:
    """Prints the times of several sizes of the kernel."""
    for depth, columns in shapes:
        if dtype != jnp.bfloat16 and depth % 256:
            continue
        weights = make_of(dtype, depth, columns)
        for rows in all_rows:
            ways: dict[str, Any] = {}
            for each in tunings(rows, depth, columns, dtype):
                ways[str(each)] = functools.partial(tuned, tuning=each)
            found = time_ways(ways, rows, weights)
            print(f"{rows} rows, {depth} x {columns}, {dtype.__name__}")
            num_bytes = num_bits(dtype) * depth * columns // 8
            for name in sorted(found, key=lambda name: found[name])[:6]:
                print("  ", show(found[name], num_bytes, copy), name)


def check(shapes, all_rows) -> None:
    """Prints the largest difference to sums in float32, over the largest number."""
    for depth, columns in shapes:
        weights = make_weights(depth, columns)[0]
        for rows in all_rows:
            x = make_rows(rows, depth)
            found, again = jax.jit(ours)(x, weights), jax.jit(ours)(x, weights)
            expected = jnp.dot(x, weights, preferred_element_type=jnp.float32)
            error = jnp.abs(found - expected).max() / jnp.abs(expected).max()
            repeats = "repeats" if (found == again).all() else "DOES NOT REPEAT"
            print(f"{rows} rows, {depth} x {columns}: {error:.2e}, {repeats}")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--codes", action="store_true")
    parser.add_argument("--blocks", action="store_true")
    given = parser.parse_args()
    shapes, rows = QUICK if given.quick else (SHAPES, ROWS)
    if given.checks:
        check(shapes, rows)
    copy = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}: a copy at {copy / 1e12:.2f} TB/s")
    if given.blocks:
        compare_blocks(rows, copy)
        return
    if given.sweep:
        for dtype in BLOCK_DTYPES[1:] if given.codes else BLOCK_DTYPES[:1]:
            sweep(shapes, rows, copy, dtype)
        return
    (compare_codes if given.codes else compare)(shapes, rows, copy)


if __name__ == "__main__":
    main()
