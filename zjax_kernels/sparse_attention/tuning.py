"""How the kernels run best: a table of the H200, and what was measured elsewhere.

`tune` measures on this GPU and keeps what it finds under the user's cache folder; from
then on it is used in place of the table.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from zjax_kernels.device import check_implementation
from zjax_kernels.sparse_attention.plan import Plan
from zjax_kernels.sparse_attention.schedule import PROCESSORS

ROUNDS, CALLS = 5, 10


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a kernel runs; none of it changes the result.

    Args:
        stages: Chunks in shared memory at a time, 1 or more.
        tiles: Tiles in shared memory at a time, 1 or more.
        ping_pong: Whether the two halves take turns on the tensor cores; in the forward
            pass alone.
        warpgroup: Whether Mosaic lowers by warpgroups rather than by lanes.
        programs: Programs that run side by side.
    """

    stages: int = 2
    tiles: int = 1
    ping_pong: bool = False
    warpgroup: bool = False
    programs: int = PROCESSORS


H200 = {
    "forward": {
        64: Tuning(stages=4, tiles=2, ping_pong=True),
        96: Tuning(stages=2, tiles=2, ping_pong=True),
        128: Tuning(stages=2, tiles=2, ping_pong=True),
        256: Tuning(stages=2, ping_pong=True),
    },
    "queries": {
        64: Tuning(stages=3, tiles=2),
        96: Tuning(stages=2),
        128: Tuning(stages=2),
        256: Tuning(stages=1),
    },
    "keys": {
        64: Tuning(stages=4, tiles=2),
        96: Tuning(stages=2, tiles=2),
        128: Tuning(stages=2, tiles=2),
        256: Tuning(stages=1),
    },
}
"""By kernel and head size."""


def choose(kernel: str, head_size: int, *, segmented: bool) -> Tuning:
    """What a kernel is run with if nothing is asked for.

    Args:
        kernel: `forward`, `queries` or `keys`.
        head_size: Channels per head: 64, 96, 128 or 256.
        segmented: Whether there are segments, which take room.

    Returns:
        What `tune` found on this kind of GPU, or what the table says.

    Example:
        >>> choose("forward", 128, segmented=False).stages
        2
    """
    found = _tuned().get(_key(kernel, head_size)) or H200[kernel][head_size]
    crowded = kernel == "keys" and head_size == 128
    return dataclasses.replace(found, tiles=1) if crowded and segmented else found


def tune(
    plan: Plan, *, head_size: int, batch: int = 1, dtype: Any = jnp.bfloat16
) -> dict[str, list[tuple[Tuning, float]]]:
    """Measures what runs a plan fastest, and keeps it for this kind of GPU.

    Args:
        plan: A plan like those that will be run.
        head_size: Channels per head: 64, 96, 128 or 256.
        batch: Sequences per call.
        dtype: bfloat16 or float16.

    Returns:
        Per kernel what was tried and the seconds it took, fastest first.

    Raises:
        NotImplementedError: This GPU cannot run the kernels.
        ValueError: The head size or dtype is none of the kernels'.
    """
    check_implementation("mosaic_gpu", dtype=jnp.dtype(dtype).name, head_size=head_size)
    results = {}
    for kernel, run in _kernels(plan, head_size, batch, dtype).items():
        tried = []
        for tuning in _candidates(kernel):
            try:
                tried.append((tuning, _seconds(functools.partial(run, tuning))))
            except ValueError:  # more than there is shared memory
                continue
        results[kernel] = sorted(tried, key=lambda each: each[1])
    best = {kernel: tried[0][0] for kernel, tried in results.items()}
    _keep({_key(kernel, head_size): tuning for kernel, tuning in best.items()})
    return results


def _candidates(kernel: str) -> Iterator[Tuning]:
    turns = (False, True) if kernel == "forward" else (False,)
    for stages, tiles, turn, warpgroup in itertools.product(
        (1, 2, 3, 4), (1, 2), turns, (False, True)
    ):
        yield Tuning(stages, tiles, turn, warpgroup)


def _kernels(plan, head_size, batch, dtype) -> dict[str, Callable[[Tuning], Any]]:
    from zjax_kernels.sparse_attention import mosaic_gpu  # which reads this table
    from zjax_kernels.sparse_attention.reference import Options

    heads, kv_heads = (len(x.head_patterns) for x in (plan.queries, plan.keys))
    of_q = (batch, plan.queries.num_rows, heads, head_size)
    of_k = (batch, plan.keys.num_rows, kv_heads, head_size)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, (of_q, of_k, of_k, of_q), strict=True)
    )
    sums = jnp.zeros((batch, heads, plan.queries.num_rows))
    options = Options(head_size**-0.5)
    backward = q, k, v, d_out, sums, sums, None
    arguments = {
        "forward": (mosaic_gpu.forward, (q, k, v, None, plan.queries)),
        "queries": (mosaic_gpu.backward_queries, (*backward, plan.queries)),
        "keys": (mosaic_gpu.backward_keys, (*backward, plan.keys)),
    }

    def runner(kernel, arrays):
        arrays = jax.tree.map(jnp.asarray, arrays)

        def run(tuning):
            call = jax.jit(lambda arrays: kernel(*arrays, options, tuning=tuning))
            return call.lower(arrays).compile(), arrays

        return run

    return {name: runner(*each) for name, each in arguments.items()}


def _seconds(compile_: Callable[[], tuple[Callable[..., Any], Any]]) -> float:
    call, arrays = compile_()
    jax.block_until_ready(call(arrays))
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([call(arrays) for _ in range(CALLS)])
        seconds.append((time.perf_counter() - start) / CALLS)
    return statistics.median(seconds)


def _key(kernel, head_size):
    return f"{jax.devices()[0].device_kind}, {kernel}, {head_size}"


def _file() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "zjax_kernels" / "sparse_attention.json"


@functools.cache
def _tuned() -> dict[str, Tuning]:
    path = _file()
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return {key: Tuning(**fields) for key, fields in found.items()}


def _keep(best: dict[str, Tuning]) -> None:
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {k: dataclasses.asdict(x) for k, x in (_tuned() | best).items()}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(known, indent=2) + "\n")
    part.replace(path)
    _tuned.cache_clear()
