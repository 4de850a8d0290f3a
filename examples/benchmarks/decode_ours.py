"""A Llama or a mixture of random weights that zjax decodes.

python examples/benchmarks/decode_ours.py [--shape=7b] [--batches=1,16,64] [--profile]
python examples/benchmarks/decode_ours.py --continuous [--num_new=512,2048]
    [--min_new=128] [--max_rows=32] [--in_batches]

A sweep is what the engine adds to all rows at once, from the arrival of one pass on the
host to a later one. The first sweep also compiles, and reads the prompts, whose pages
are found again by later ones. `--profile` prints the kernels of a sweep. For a mixture,
one more sweep counts the experts that the rows choose.

Of many requests, `--max_rows` have a row at once, and a request that ends makes room
for the next; `--in_batches` lets all of a batch end before the next batch begins.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from itertools import count

import call_timing
import copy_bandwidth
import decode_cases as cases
import jax
import jax.numpy as jnp
import kernel_times
import timing
from flax import nnx
from mixtures import Mixture

from zjax.generation.dtypes import COMPUTE
from zjax.generation.engine import Request
from zjax.generation.generate import make_engine
from zjax.generation.passes import Reader, Weights
from zjax.generation.plan import NUM_STEPS, Size
from zjax.generation.programs import Programs, page_bytes
from zjax.generation.sampling import Sampling
from zjax.generation.sequence import Sequence
from zjax.generation.sizes import NUM_CHUNKS, PAGE_SIZE
from zjax.models.continuation import params_of
from zjax.models.layers import Normalized
from zjax.models.mixture import MixtureOfExperts
from zjax.models.stack import Decoder
from zjax.settings import schema
from zjax.sharding.layers import layers_of

WARM_UP_TOKENS = 16
"""Tokens that every row gets before a sweep begins."""


def model_settings(shape):
    """Settings of the built-in decoder."""
    is_mixture, moe = isinstance(shape, Mixture), None
    if is_mixture:
        experts = shape.num_experts, shape.top_k, shape.mlp_size
        names = "num_experts", "top_k", "expert_size"
        moe = schema.TokenChoice(**dict(zip(names, experts, strict=True)))
    return schema.Model(
        num_layers=shape.num_layers,
        embed_size=shape.embed_size,
        mlp_size=shape.mlp_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        query_key_norm=is_mixture,
        moe=moe,
        vocab_size=shape.vocab_size,
        max_length=shape.length,
        norm="rms_norm",
        norm_eps=1e-6 if is_mixture else 1e-5,
        positions=schema.Rotary(theta=1_000_000.0 if is_mixture else 500_000.0),
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


class RandomDecoder:
    """A decoder for `zjax.generate`, of random weights that are made block by block.

    Args:
        shape: Shape of the model.
        dtypes: How weights and keys are stored.
    """

    def __init__(self, shape, dtypes=COMPUTE):
        self.config, self._dtypes = model_settings(shape), dtypes
        self.pending_bytes, self.axes = 0, ()
        reader, model = self._make_reader(), self._make_model()
        embed, segments, head = reader.stack.split(params_of(model))
        keys = map(functools.partial(jax.random.fold_in, jax.random.key(0)), count())

        def fill(tree):
            return jax.tree.map(lambda leaf: draw(next(keys), leaf.shape), tree)

        blocks = []
        for number, stacked in enumerate(segments):
            lay = jax.jit(reader.continuation.lay[number])
            num_blocks = reader.stack.segments[number].num_blocks
            cut = functools.partial(layers_of, num_layers=num_blocks)
            # Cut already: the weights of a large model would not fit twice.
            blocks += [lay(fill(x)) for x in jax.eval_shape(cut, stacked)]
        made = Weights(fill(embed), tuple(blocks), fill(head))
        self.weights = jax.block_until_ready(made)

    def passes(self, **shapes):
        """Makes passes of the shapes that `Programs` takes."""
        return Programs(self._make_reader(), self.weights, **shapes)

    def page_bytes(self, page_size):
        """Counts the bytes on a device of a page of all layers."""
        return page_bytes(self._make_reader(), self.weights, page_size)

    def _make_reader(self):
        """Makes the functions of the decoder, which trace what models do now."""
        return Reader.of(self._make_model(), self._dtypes)

    def _make_model(self):
        """Makes the module without values."""
        return nnx.eval_shape(lambda: Decoder(self.config, rngs=nnx.Rngs(0)))


def make_static_engine(decoder, num_rows, length):
    """An engine with room for rows of a length, and passes for all rows alone."""
    num_pages = 1 + num_rows * (2 + -(-length // PAGE_SIZE))
    several = Size(num_rows, steps=NUM_STEPS)
    sizes = Size(num_rows), several, Size(num_rows, NUM_CHUNKS)
    engine = make_engine(decoder, sizes, length, num_pages)
    engine.compile()
    return engine


def add_rows(engine, prompts, sizes):
    """Queues a row for each prompt, which takes a number of the most likely tokens."""
    rows = []
    for prompt, num_new in zip(prompts, sizes, strict=True):
        request = Request(Sampling(max_new_tokens=num_new))
        rows.append(Sequence(prompt, num_new, request=request))
        engine.scheduler.add(rows[-1])
    return rows


def sweep(engine, case, tracing=None):
    """Seconds per token, while passes read all rows together."""
    prompts = [prompt[:-WARM_UP_TOKENS] for prompt in case.prompts()]
    num_new = case.shape.length - len(prompts[0])
    rows = add_rows(engine, prompts, [num_new] * case.batch)
    while min(len(row.generated) for row in rows) < WARM_UP_TOKENS:
        engine.step()
    with tracing or contextlib.nullcontext():
        seconds = time_tokens(engine, rows, case.num_tokens)
    for row in rows:
        engine.scheduler.abort(row)
    finish(engine)
    return seconds


def time_tokens(engine, rows, num_tokens):
    """Seconds per token, until rows that all go on have got so many tokens."""
    start, num_before = time.perf_counter(), len(rows[0].generated)
    while (num_new := len(rows[0].generated) - num_before) < num_tokens:
        engine.step()
    return (time.perf_counter() - start) / num_new


def finish(engine):
    """Waits for all passes."""
    while engine.step() is not None:
        pass


def time_case(decoder, case, copy, given):
    """Metrics of a case, with the share of a copy."""
    start = time.perf_counter()
    engine = make_static_engine(decoder, case.batch, case.shape.length)
    sweep(engine, case)
    first = time.perf_counter() - start
    seconds = [sweep(engine, case) for _ in range(given.num_sweeps)]
    if given.profile:
        tracing = kernel_times.Trace()
        sweep(engine, case, tracing)
        kernel_times.show(tracing.kernels, case.num_tokens, "token")
    metrics = {}
    if isinstance(case.shape, Mixture):
        del engine
        case = dataclasses.replace(case, num_experts=count_experts(decoder, case))
        metrics[case.metric("experts")] = case.num_experts
    shares = [case.num_bytes / each / copy for each in seconds]
    metrics |= case.describe(seconds) | {
        case.metric("share"): timing.spread(shares),
        case.metric("first_seconds"): first,
    }
    share = metrics[case.metric("share")]["median"]
    label = f"batch {case.batch}, {share:.3f} of a copy"
    call_timing.note(f"{label}, {first:.0f} s to the first sweep", seconds)
    return metrics


def count_experts(decoder, case):
    """Mean number of experts that the rows of a case choose in a layer."""
    if case.batch == 1:
        return case.shape.top_k
    with counted_experts(case.batch) as numbers:
        sweep(make_static_engine(decoder, case.batch, case.shape.length), case)
        jax.effects_barrier()
    return statistics.mean(numbers)


@contextlib.contextmanager
def counted_experts(num_tokens):
    """Lets mixtures note how many experts so many tokens choose; yields the numbers."""
    numbers, call = [], MixtureOfExperts.__call__

    def counting(self, x, *args, **options):
        rows = x.apply() if isinstance(x, Normalized) else x
        experts = self.chosen_experts(rows)
        if experts.size == num_tokens * self.settings.top_k:
            all_experts = jnp.arange(self.settings.num_experts)
            number = jnp.isin(all_experts, experts).sum()
            jax.debug.callback(lambda found: numbers.append(int(found)), number)
        return call(self, x, *args, **options)

    jax.clear_caches()  # programs that were traced do not count
    MixtureOfExperts.__call__ = counting
    try:
        yield numbers
    finally:
        MixtureOfExperts.__call__ = call
        jax.clear_caches()


def time_requests(decoder, workloads, given):
    """Metrics of many requests, after a run that compiles."""
    longest = max(x.num_given + x.num_new for x in workloads)
    num_rows = given.max_rows or given.num_requests
    engine = make_static_engine(decoder, num_rows, longest)
    num_few = min(workloads[0].num_new, WARM_UP_TOKENS)
    few = dataclasses.replace(workloads[0], num_new=num_few, min_new=0)
    metrics = {}
    for workload in (few, *workloads):
        num_runs = 1 if workload is few else given.num_sweeps
        seconds = [
            serve(engine, workload, decoder.config.vocab_size, given.in_batches)
            for _ in range(num_runs)
        ]
        call_timing.note(f"{workload.metric}, all requests", seconds)
        metrics |= {} if workload is few else workload.describe(seconds)
    return metrics


def serve(engine, workload, vocab_size, in_batches):
    """Seconds in which an engine serves all requests, together or in batches."""
    prompts, sizes = workload.prompts(vocab_size), workload.sizes()
    num_at_once = engine.scheduler.max_rows if in_batches else len(prompts)
    start, rows = time.perf_counter(), []
    for first in range(0, len(prompts), num_at_once):
        batch = slice(first, first + num_at_once)
        rows += add_rows(engine, prompts[batch], sizes[batch])
        finish(engine)
    seconds = time.perf_counter() - start
    assert [len(row.generated) for row in rows] == sizes
    return seconds


def _with_room(shape, length):
    """Returns a shape with positions for texts of a length."""
    return dataclasses.replace(shape, length=max(shape.length, length))


def main() -> None:
    parser = cases.make_parser()
    cases.add_workload(parser)
    parser.add_argument("--max_rows", type=int, default=0, help="0: all requests")
    parser.add_argument(
        "--in_batches", action="store_true", help="no request joins others"
    )
    parser.add_argument("--profile", action="store_true", help="print kernels")
    parser.add_argument("--copy_floats", type=int, default=copy_bandwidth.NUM_FLOATS)
    given = parser.parse_args()
    chosen = cases.make_cases(given)
    workloads = cases.make_workloads(given) if given.continuous else []
    metrics = copy_bandwidth.measure(given.copy_floats)
    copy = metrics["copy_bytes_per_second"]["median"]
    length = max((x.num_given + x.num_new for x in workloads), default=0)
    decoder = RandomDecoder(_with_room(chosen[0].shape, length))
    if given.continuous:
        metrics |= time_requests(decoder, workloads, given)
    else:
        for case in chosen:
            metrics |= time_case(decoder, case, copy, given)
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
