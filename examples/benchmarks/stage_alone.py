"""One stage of a pipeline alone on one device, for as many turns as 1F1B takes.

It has its share of the layers and of the vocabulary. P stages are through with M
microbatches when each has had time for M + P - 1 of them, so that this one takes as
many; what a step takes once, such as the update, it takes once, as the pipeline does.

python examples/benchmarks/stage_alone.py --stages=4 configs/gpt_6p7b.py zero.stage=1
    model.num_layers=16 num_microbatches=8 microbatch_size=1 global_batch_size=0
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence

import jax

from zjax.config import Config, load_config
from zjax.processes.programs import result_line
from zjax.run.bench import describe_measurement, measure


def one_stage(config: Config, num_stages: int) -> Config:
    """A run of the largest stage, where they are not equal."""
    model = dataclasses.replace(
        config.model,
        num_layers=math.ceil(config.model.num_layers / num_stages),
        vocab_size=math.ceil(config.model.vocab_size / num_stages),
    )
    turns = config.num_microbatches + num_stages - 1
    return dataclasses.replace(config, model=model, num_microbatches=turns)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args(words)
    config = one_stage(load_config(given.config, *given.settings), given.stages)
    measurement = measure(config, name="one stage", devices=jax.devices()[:1])
    print(describe_measurement(measurement))
    print(result_line(dataclasses.asdict(measurement)))


if __name__ == "__main__":
    main()
