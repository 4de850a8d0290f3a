"""What methods lose that communicate less: validation losses over those of their twins.

A twin trains on the same batches with the same learning rates, and its replicas send
all numbers in every step. Each finished run is a line of `<directory>/runs.jsonl`, and
is not run again; the picture is `<directory>/curves.png`.

python examples/benchmarks/method_quality.py [--methods=adam,diloco] [--seeds=0,1,2]
    [--directory=runs/communication_quality] [setting=value ...]
"""

import pathlib

import call_timing
import jax
import package_text
import quality_records
from quality_training import Method, make_run, train_missing

import zjax
from zjax.data.store import digest_tokenizer
from zjax.run.compiler import use_program_cache

DIRECTORY = pathlib.Path("runs/communication_quality")
NUM_POINTS = 20
SETTINGS = {
    "num_steps": 2000,
    "global_batch_size": 32,
    "mesh": {"replica": -1, "data": 1},
    "zero": {"stage": 0},
    "data": {"source": "tokens"},
    "model": {
        "num_layers": 17,
        "embed_size": 768,
        "num_heads": 12,
        "max_length": 512,
        "layers_per_scan": 1,
        "remat": "none",
        "loss_chunk_tokens": 0,
    },
    "optimizer": {
        "rule": {"b2": 0.99},
        "schedule": {"num_warmup_steps": 200},
        "peak_learning_rate": 0.0006,
    },
    "evaluation": {"num_batches": 16},
}
FREEZE = {"optimizer.rule.freeze_step": 600}
LAMB = {"optimizer.peak_learning_rate": 5e-3}
TWO_REPLICAS = {"mesh": {"replica": 2, "data": -1}}
LOCAL = TWO_REPLICAS | {
    "communication.local_steps.num_synchronous_steps": 600,
    "communication.local_steps.num_steps": 10,
    "communication.local_steps.outer_learning_rate": 0.5,
    "communication.local_steps.outer_momentum": 0.8,
}
"""Rounds begin where the warm-up of the methods above ends."""
STREAMED = LOCAL | {
    "communication.codec": "int4",
    "communication.local_steps.num_fragments": 4,
    "communication.local_steps.delay": 1,
    "communication.local_steps.mixing": 0.5,
}
MULOCO = {
    "optimizer.rule": "muon",
    "communication.codec": "int2",
    "communication.local_steps.outer_learning_rate": 0.7,
    "communication.local_steps.outer_momentum": 0.5,
}
ZEROPP = TWO_REPLICAS | {
    "zero.stage": 3,
    "zero.replicas.quantized_weights": True,
    "zero.replicas.quantized_gradients": True,
    "model.layers_per_scan": 0,
}
METHODS = {
    "adam": {},
    "adam_int8": {"communication.codec": "int8"},
    "onebit_adam": {"optimizer.rule": "onebit_adam"} | FREEZE,
    "zero_one_adam": {"optimizer.rule": "zero_one_adam"} | FREEZE,
    "diloco": LOCAL,
    "streaming_diloco": STREAMED,
    "muon": {"optimizer.rule": "muon"},
    "muloco": LOCAL | MULOCO,
    "lamb": {"optimizer.rule": "lamb"} | LAMB,
    "onebit_lamb": {"optimizer.rule": "onebit_lamb"} | LAMB | FREEZE,
    "zeropp": ZEROPP,
}
TWINS = {
    "adam_int8": "adam",
    "onebit_adam": "adam",
    "zero_one_adam": "adam",
    "diloco": "adam",
    "streaming_diloco": "adam",
    "muloco": "muon",
    "onebit_lamb": "lamb",
    "zeropp": "adam",
}
"""ZeRO-3 takes the steps of Adam, so that it needs no runs of its own."""


def make_config(method, *more):
    return zjax.load_config(SETTINGS, METHODS[method], *more)


def compare(records, seeds):
    return quality_records.compare(records, TWINS, seeds)


def parse(words=None):
    text = DIRECTORY / "text"
    return quality_records.parse(__doc__, METHODS, DIRECTORY, text, words)


def main():
    given = parse()
    use_program_cache()
    package_text.prepare_text(given.text)
    settings = [f"data.path={given.text}", *given.settings]
    common = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "text": digest_tokenizer(str(given.text)),
    }
    setups = {
        method: common | {"settings": [SETTINGS, changes, *given.settings]}
        for method, changes in METHODS.items()
    }
    records = quality_records.Records(given.directory / "runs.jsonl", setups)

    def make_method(name):
        return Method(make_run(make_config(name, *settings)), NUM_POINTS)

    train_missing(given.methods, given.seeds, records, make_method)
    quality_records.plot(records.read(), TWINS, given.directory / "curves.png")
    found = compare(records, given.seeds)
    call_timing.print_result(
        found | {"num_devices": jax.device_count()},
        device=jax.devices()[0].device_kind,
        packages=("jax",),
    )


if __name__ == "__main__":
    main()
