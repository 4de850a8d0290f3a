"""What dropped tokens cost: validation losses over those of runs that drop none.

Runs of a seed have equal batches, learning rates and initial weights. Kept tokens are
those of `kept_schedule`. Each finished run is a line of `<directory>/runs.jsonl`, and
is not run again.

python examples/benchmarks/random_ltd_quality.py [--methods=plain,layerwise,span]
    [--seeds=0,1,2] [--directory=runs/random_ltd_quality] [setting=value ...]
"""

import pathlib

import call_timing
import jax
import package_text
import quality_records
from kept_schedule import PHASES, make_pacing
from quality_training import SMALL_GPT, Method, make_run, train_missing

import zjax
from zjax.data.store import digest_tokenizer
from zjax.run.compiler import use_program_cache

DIRECTORY = pathlib.Path("runs/random_ltd_quality")
SETTINGS = {
    "num_steps": 5000,
    "global_batch_size": 64,
    "zero": {"stage": 0},
    "data": {"source": "tokens"},
    "model": SMALL_GPT | {"max_length": 512, "loss_chunk_tokens": 0},
    "optimizer": {"peak_learning_rate": 1e-3, "schedule": "wsd"},
    "evaluation": {"num_batches": 16},
}
NUM_POINTS = 20
PLAIN = "plain"
METHODS = {PLAIN: {}} | {form: {"random_ltd": form} for form in ("layerwise", "span")}
TWINS = {method: PLAIN for method in METHODS if method != PLAIN}


def make_config(method, *more):
    config = zjax.load_config(SETTINGS, METHODS[method], *more)
    if method == PLAIN:
        return config
    pacing = make_pacing(config.data.length, config.num_steps)
    return zjax.load_config(config, {"random_ltd.pacing": pacing})


def compare(records, seeds):
    return quality_records.compare(records, TWINS, seeds)


def main():
    text = DIRECTORY / "text"
    given = quality_records.parse(__doc__, METHODS, DIRECTORY, text)
    use_program_cache()
    package_text.prepare_text(given.text)
    settings = [f"data.path={given.text}", *given.settings]
    common = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "text": digest_tokenizer(str(given.text)),
    }
    setups = {
        method: common | {"settings": [SETTINGS, PHASES, changes, *given.settings]}
        for method, changes in METHODS.items()
    }
    records = quality_records.Records(given.directory / "runs.jsonl", setups)

    def make_method(name):
        return Method(make_run(make_config(name, *settings)), NUM_POINTS)

    train_missing(given.methods, given.seeds, records, make_method)
    quality_records.plot(records.read(), TWINS, given.directory / "curves.png")
    call_timing.print_result(
        compare(records, given.seeds),
        device=jax.devices()[0].device_kind,
        packages=("jax",),
    )


if __name__ == "__main__":
    main()
