"""A Llama of random weights that zjax decodes.

python examples/benchmarks/decode_ours.py [--shape=7b] [--batches=1,16,64] [--profile]
python examples/benchmarks/decode_ours.py --continuous [--num_new=512]

A sweep is what the engine adds to all rows at once, from the arrival of one pass on the
host to a later one. The first sweep also compiles, and reads the prompts, whose pages
are found again by later ones. `--profile` prints the kernels of a sweep.
"""

import contextlib
import functools
import time

import call_timing
import copy_bandwidth
import decode_cases as cases
import jax
import jax.numpy as jnp
import kernel_times
import timing
from flax import nnx

from zjax.generation.engine import Engine, Request
from zjax.generation.generate import NUM_CHUNKS, PAGE_SIZE
from zjax.generation.passes import Reader
from zjax.generation.plan import Size
from zjax.generation.pool import Pool
from zjax.generation.programs import Programs
from zjax.generation.sampling import Sampling
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence
from zjax.models.continuation import params_of
from zjax.models.stack import Decoder
from zjax.observe.recompile import CompileReport
from zjax.settings import schema

WARM_UP_TOKENS = 16
"""Tokens that every row gets before a sweep begins."""


def model_settings(shape):
    return schema.Model(
        num_layers=shape.num_layers,
        embed_size=shape.embed_size,
        mlp_size=shape.mlp_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_length=shape.length,
        norm="rms_norm",
        norm_eps=1e-5,
        positions=schema.Rotary(theta=500_000.0),
        activation="swiglu",
        use_bias=False,
        tied_head=False,
    )


@functools.partial(jax.jit, static_argnums=1)
def draw(key, shape):
    """Weights in bfloat16; vectors are scales of norms."""
    if len(shape) == 1:
        return jnp.ones(shape, jnp.bfloat16)
    return jax.random.normal(key, shape, jnp.bfloat16) * 0.02


def make_decoder(shape):
    """Functions and weights of a decoder, made on the device one by one."""
    config = model_settings(shape)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    reader = Reader.of(model)
    weights = jax.eval_shape(reader.cut, params_of(model))
    leaves, tree = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [draw(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return reader, jax.tree.unflatten(tree, drawn)


def make_engine(decoder, num_rows, length):
    """An engine with room for rows of a length."""
    num_pages = 1 + num_rows * (2 + -(-length // PAGE_SIZE))
    passes = Programs(
        *decoder,
        num_slots=num_rows,
        max_length=length,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
    )
    sizes = Size(num_rows), Size(num_rows, NUM_CHUNKS)
    return Engine(
        passes, Scheduler(Pool(num_pages, PAGE_SIZE), num_rows, length, sizes)
    )


def add_rows(engine, prompts, num_new):
    """Queues a row for each prompt, which takes the most likely tokens."""
    request = Request(Sampling(max_new_tokens=num_new))
    rows = [Sequence(prompt, num_new, request=request) for prompt in prompts]
    for row in rows:
        engine.scheduler.add(row)
    return rows


def sweep(engine, case, tracing=None):
    """Seconds per token, while passes read all rows together."""
    prompts = [prompt[:-WARM_UP_TOKENS] for prompt in case.prompts()]
    rows = add_rows(engine, prompts, case.shape.length - len(prompts[0]))
    while min(len(row.generated) for row in rows) < WARM_UP_TOKENS:
        engine.step()
    with tracing or contextlib.nullcontext():
        start, num_before = time.perf_counter(), len(rows[0].generated)
        while (num_new := len(rows[0].generated) - num_before) < case.num_tokens:
            engine.step()
        seconds = (time.perf_counter() - start) / num_new
    for row in rows:
        engine.scheduler.abort(row)
    finish(engine)
    return seconds


def finish(engine):
    """Waits for all passes."""
    while engine.step() is not None:
        pass


def time_case(decoder, case, copy, given):
    """Metrics of a case, with the share of a copy and the seconds of compilation."""
    start = time.perf_counter()
    with CompileReport() as report, report.watch(0, {}) as compiled:
        engine = make_engine(decoder, case.batch, case.shape.length)
        sweep(engine, case)
    first = time.perf_counter() - start
    seconds = [sweep(engine, case) for _ in range(given.num_sweeps)]
    shares = [case.num_bytes / each / copy for each in seconds]
    metrics = case.describe(seconds) | {
        case.metric("share"): timing.spread(shares),
        case.metric("compile_seconds"): compiled.seconds,
        case.metric("first_seconds"): first,
    }
    share = metrics[case.metric("share")]["median"]
    label = f"batch {case.batch}, {share:.3f} of a copy, {compiled.seconds:.0f} s of "
    call_timing.note(f"{label}compilation, {first:.0f} s to the first sweep", seconds)
    if given.profile:
        tracing = kernel_times.Trace()
        sweep(engine, case, tracing)
        kernel_times.show(tracing.kernels, case.num_tokens, "token")
    return metrics


def time_requests(decoder, workload, vocab_size, num_runs):
    """Metrics of many requests, after a run that compiles."""
    num_rows, num_new = workload.num_requests, workload.num_new
    engine = make_engine(decoder, num_rows, workload.num_given + num_new)
    seconds = []
    for _ in range(1 + num_runs):
        start = time.perf_counter()
        rows = add_rows(engine, workload.prompts(vocab_size), num_new)
        finish(engine)
        seconds.append(time.perf_counter() - start)
        assert {len(row.generated) for row in rows} == {num_new}
        call_timing.note("all requests", seconds[-1:])
    return workload.describe(seconds[1:])


def main() -> None:
    parser = cases.make_parser()
    cases.add_workload(parser)
    parser.add_argument("--profile", action="store_true", help="print kernels")
    parser.add_argument("--copy_floats", type=int, default=copy_bandwidth.NUM_FLOATS)
    given = parser.parse_args()
    chosen = cases.make_cases(given)
    shape = chosen[0].shape
    metrics = copy_bandwidth.measure(given.copy_floats)
    copy = metrics["copy_bytes_per_second"]["median"]
    decoder = make_decoder(shape)
    if given.continuous:
        workload = cases.Workload(given.num_requests, num_new=given.num_new)
        options = shape.vocab_size, given.num_sweeps
        metrics |= time_requests(decoder, workload, *options)
    else:
        for case in chosen:
            metrics |= time_case(decoder, case, copy, given)
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
