"""A run whose blocks rest on the host: its speed, and its least device memory.

Three blocks have to be on the device with their gradients, the embedding, the input of
every block, and what the program of a block needs besides. The run takes 20 steps or
more, on one device and in bfloat16.

python examples/benchmarks/device_peak.py configs/gpt_6p7b.py zero.stage=2
    zero.optimizer_memory=pinned_host zero.parameter_memory=pinned_host
    zero.gradient_memory=pinned_host model.remat=full
"""

import dataclasses
import sys

import jax
from matmul_share import describe_share

import zjax
from zjax.bench import describe_measurement, measure, result_line
from zjax.fitting import abstract_batch
from zjax.sharding.placement import layer_of

NUM_BLOCKS = 3
NUM_ROUNDS = 17
"""Of one step, after three steps to warm up."""


def least_bytes(config: zjax.Config) -> dict[str, int]:
    """What cannot be elsewhere, by name."""
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    plan = zjax.make_plan(config, zjax.make_mesh(config.mesh), model, tx)
    batch = abstract_batch(config, plan)
    step = zjax.make_step(model, tx, plan, config)
    blocks, others = 0, 0
    for keys, row in jax.tree_util.tree_leaves_with_path(plan.compute):
        if layer_of(keys) is None:
            others += row.device_bytes
        else:
            blocks += row.device_bytes
    block = blocks // config.model.num_layers
    inputs = 2 * batch["tokens"].size * config.model.embed_size
    peak = step.predict_peak(batch)
    assert peak.moment == "backward", peak
    program = peak.parts["program"]
    return {
        "blocks with gradients": 2 * NUM_BLOCKS * block,
        "embedding and head": others,
        "inputs of blocks": inputs * config.model.num_layers,
        "temporaries of a block": program - block,  # its results are gradients
    }


def main() -> None:
    config = zjax.load_config(sys.argv[1], *sys.argv[2:])
    measurement = measure(config, num_rounds=NUM_ROUNDS)
    print(describe_measurement(measurement))
    parts = least_bytes(config)
    print(*(f"{name}: {size / 1e9:.2f} GB" for name, size in parts.items()), sep="\n")
    found = {
        "least_bytes": sum(parts.values()),
        "bytes_beyond_inputs": measurement.peak_bytes - parts["inputs of blocks"],
    }
    share = describe_share(config, measurement)
    print(result_line(dataclasses.asdict(measurement) | share | found))


if __name__ == "__main__":
    main()
