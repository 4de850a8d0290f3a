"""GPT-2 124M whose tokens see few others in the first 600 steps (arXiv:2503.15450).

The attention window grows from 64 to 1,024 tokens, for batches and a learning rate four
times those of configs/gpt2_124m.py.

Run:     zjax train --config=configs/gpt2_window_warmup.py
Needs:   one data-centre GPU, or several whose number divides 128.
Expect:  one program for the whole run; on Hopper GPUs its first steps are the fastest.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_window_warmup"
    config.num_steps = 2_000
    config.global_batch_size = 128

    config.zero.stage = 1

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.vocab_size = 50_257
    config.model.max_length = 1_024

    config.optimizer.peak_learning_rate = 2.4e-3
    config.optimizer.schedule.num_warmup_steps = 200

    config.sequence_warmup = "window"
    config.sequence_warmup.pacing.num_steps = 600
    return config
