"""GPT-2 with 124 million parameters on texts of 65,536 tokens, with BigBird's blocks.

Each token attends causally to its own block, the one before, the first, and a random
one. A text holds several documents of the source.

Run:     zjax train --config=configs/gpt_sparse_64k.py
Needs:   one H100 or H200, or several whose number divides 8. Other devices run the
         same blocks without the kernels, slowly.
Expect:  attention over 1.3 % of the pairs of dense attention. Not measured on a GPU
         yet.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt_sparse_64k"
    config.num_steps = 10_000
    config.global_batch_size = 8
    config.microbatch_size = 1

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.vocab_size = 50_257
    config.model.max_length = 65_536
    config.model.positions = "rotary"
    config.model.attention = "sparse"
    config.model.attention.pattern = "bigbird"
    config.model.attention.block = 128
    config.model.remat = "attention"

    config.optimizer.peak_learning_rate = 6e-4
    config.optimizer.schedule.num_warmup_steps = 200
    return config
