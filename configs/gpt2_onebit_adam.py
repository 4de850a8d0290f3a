"""GPT-2 with 124 million parameters, whose replicas send one bit per number.

The first 15 % of the steps send gradients in bfloat16, as Adam does; then each replica
sends steps in one bit per number, twice, an eighth of a byte each way.

Run:     zjax train --config=configs/gpt2_onebit_adam.py
Needs:   two GPUs or more whose number is even and divides 32. It pays where the link
         between two halves of them is slow, as between nodes without InfiniBand.
Expect:  4.9 times fewer bytes between replicas than with configs/gpt2_124m.py.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_onebit_adam"
    config.num_steps = 2_000
    config.global_batch_size = 32

    config.mesh.replica = 2

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.vocab_size = 50_257
    config.model.max_length = 1_024

    config.optimizer.rule = "onebit_adam"
    config.optimizer.peak_learning_rate = 6e-4
    config.optimizer.schedule.num_warmup_steps = 200
    return config
