"""GPT-2 124M whose first 600 steps have shorter sequences (arXiv:2108.06084).

Sequences grow from 64 to 1,024 tokens, for batches and a learning rate four times those
of configs/gpt2_124m.py.

Run:     zjax train --config=configs/gpt2_seqlen_warmup.py
Needs:   one data-centre GPU, or several whose number divides 128.
Expect:  16 programs, one for each length, and 85 % of the tokens of 2,000 whole steps.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_seqlen_warmup"
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

    config.sequence_warmup = "truncate"
    config.sequence_warmup.pacing.num_steps = 600
    return config
