"""BERT-base whose middle layers train on random tokens (arXiv:2211.11586).

The subsets grow from 128 to the 512 tokens of a sequence over the whole run. It
predicts 15 % of the tokens (`data.masking`).

Run:     zjax train --config=configs/bert_random_ltd.py --config.data.source=tokens
         --config.data.path=data/bert
Needs:   tokens in data/bert, made by `zjax data prepare` with the tokenizer of BERT;
         one data-centre GPU, or several whose number divides 256.
Expect:  3 programs, of 128, 256 and 384 tokens; 10 of the 12 layers see half of all
         tokens.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/bert_random_ltd"
    config.num_steps = 100_000
    config.global_batch_size = 256

    config.zero.stage = 1

    config.model.kind = "encoder"
    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.vocab_size = 30_522
    config.model.max_length = 512
    config.model.norm_eps = 1e-12

    config.optimizer.peak_learning_rate = 1e-4
    config.optimizer.schedule.num_warmup_steps = 10_000

    config.random_ltd = "layerwise"
    return config
