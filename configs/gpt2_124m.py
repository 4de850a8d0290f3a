"""GPT-2 with 124 million parameters, trained on bytes of Python's own source.

The vocabulary keeps GPT-2's 50257 entries, of which bytes use 257, so that sizes and
speeds compare with published ones.

Run:     zjax train --config=configs/gpt2_124m.py
Needs:   one data-centre GPU, or several whose number divides 32.
Expect:  on one H200 about 300,000 tokens/s; loss about 2.2 after 200 steps,
         still warming up. The text is small, so a long run overfits.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_124m"
    config.num_steps = 2_000
    config.global_batch_size = 32

    config.zero.stage = 1

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.vocab_size = 50_257
    config.model.max_length = 1_024

    config.optimizer.peak_learning_rate = 6e-4
    config.optimizer.schedule.num_warmup_steps = 200
    return config
