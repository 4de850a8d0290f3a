"""A Llama of random weights that transformers decodes.

python examples/benchmarks/decode_transformers.py [--shape=7b] [--batches=1,16,64]
python examples/benchmarks/decode_transformers.py --continuous [--num_new=512]

`generate` with `cache_implementation="static"` compiles the model with CUDA graphs
(`reduce-overhead`) by itself. On many requests `generate_batch` chooses CUDA graphs,
and flash-attention if it is installed. Of several kinds of `--attention`, the fastest
in a run of few tokens counts.
"""

import dataclasses
import functools
import sys
import time

import call_timing
import decode_cases as cases
import torch
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
)
from transformers.generation.streamers import BaseStreamer

DEVICE = "cuda"
FEW_TOKENS = 32
WARM_UP_TOKENS = 5
WARM_UP_SWEEPS = 2
"""The first compiles, the second records the graphs."""


class Clock(BaseStreamer):
    """Notes when tokens arrive on the host; the prompts are the first."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def make_model(shape, attention):
    config = LlamaConfig(
        **shape.settings(),
        attn_implementation=attention,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def time_case(model, case, num_sweeps):
    """Metrics of a case: each sweep also reads the prompts, which is not timed."""
    torch.compiler.reset()
    num_untimed = WARM_UP_TOKENS + 1
    prompts = torch.tensor(case.prompts(), device=DEVICE)[:, :-num_untimed]
    sweep = functools.partial(
        model.generate,
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_untimed + case.num_tokens,
        do_sample=False,
        cache_implementation="static",
        compile_config=CompileConfig(dynamic=False),
    )
    seconds = []
    for number in range(WARM_UP_SWEEPS + num_sweeps):
        clock, start = Clock(), time.perf_counter()
        sweep(streamer=clock)
        spent = clock.times[-1] - clock.times[-1 - case.num_tokens]
        seconds.append(spent / case.num_tokens)
        label = f"batch {case.batch}, {time.perf_counter() - start:.0f} s of a sweep"
        if number < WARM_UP_SWEEPS + 1:
            call_timing.note(label, seconds[-1:])
    return case.describe(seconds[WARM_UP_SWEEPS:])


def make_run(model, workload, compile_level):
    """A function that serves all requests, and returns the seconds."""
    if workload.min_new:
        raise SystemExit("all requests of generate_batch take as many tokens")
    serve = functools.partial(
        model.generate_batch,
        workload.prompts(model.config.vocab_size),
        generation_config=GenerationConfig(
            max_new_tokens=workload.num_new,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            default_compile_level=compile_level
        ),
        persistent_manager=True,
    )

    def run():
        start = time.perf_counter()
        found = serve()
        seconds = time.perf_counter() - start
        counts = [len(each.generated_tokens) for each in found.values()]
        if counts != workload.sizes():
            raise SystemExit(f"requests got {counts} tokens")
        call_timing.note(f"{workload.metric}, all requests", [seconds])
        return seconds

    return run


def choose_attention(model, kinds, workload, compile_level):
    """Sets the kind of attention that serves requests of few tokens fastest."""
    few, found = dataclasses.replace(workload, num_new=FEW_TOKENS), {}
    for kind in kinds:
        try:
            model.set_attn_implementation(kind)
            run = make_run(model, few, compile_level)
            run()
            found[kind] = run()
            model.destroy_cached_continuous_batching_manager()
        except Exception as error:  # each kind has its own
            print(f"{kind}: {str(error)[:300]}", file=sys.stderr, flush=True)
    if not found:
        raise SystemExit("no attention runs")
    best = min(found, key=lambda kind: found[kind])
    model.set_attn_implementation(best)
    return best


def time_requests(model, kinds, workloads, num_runs, compile_level):
    """Metrics of many requests, after a run that is not timed."""
    best = choose_attention(model, kinds, workloads[0], compile_level)
    metrics = {"attention": best}
    for workload in workloads:
        run = make_run(model, workload, compile_level)
        run()
        metrics |= workload.describe([run() for _ in range(num_runs)])
        model.destroy_cached_continuous_batching_manager()
    return metrics


def main() -> None:
    parser = cases.make_parser()
    cases.add_workload(parser)
    parser.add_argument(
        "--compile_level", type=int, default=0, help="with --continuous"
    )
    parser.add_argument("--attention", default="sdpa", help="kinds, by commas")
    given = parser.parse_args()
    chosen = cases.make_cases(given)
    shape = chosen[0].shape
    kinds = given.attention.split(",")
    with torch.no_grad():
        model = make_model(shape, kinds[0])
        if given.continuous:
            options = given.num_sweeps, given.compile_level
            metrics = time_requests(model, kinds, cases.make_workloads(given), *options)
        else:
            metrics = {}
            for case in chosen:
                metrics |= time_case(model, case, given.num_sweeps)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    call_timing.print_result(metrics, device=device, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
