"""GPT-2 with 124 million parameters under 0/1 Adam: one bit, and not in every step.

In the first 300 steps 67 gradients are sent in bfloat16 and the others in one bit per
number. Then two replicas take local steps and send how far they moved in one bit per
number, first after every step, in the end after every 16.

Run:     zjax train --config=configs/gpt2_zero_one_adam.py
Needs:   two GPUs or more whose number is even and divides 32. It pays where the link
         between two halves of them is slow, as between nodes without InfiniBand.
Expect:  16.8 times fewer bytes between replicas than with configs/gpt2_124m.py. On
         8 GPUs each holds 686 MB of state: 125 MB more than with
         configs/gpt2_onebit_adam.py, for the weights that replicas shared last.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_zero_one_adam"
    config.num_steps = 2_000
    config.global_batch_size = 32

    config.mesh.replica = 2

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.vocab_size = 50_257
    config.model.max_length = 1_024

    config.optimizer.rule = "zero_one_adam"
    config.optimizer.peak_learning_rate = 6e-4
    config.optimizer.schedule.num_warmup_steps = 200
    return config
