"""BERT-large on texts of 512 tokens, whose replicas send one bit per number.

It predicts 15 % of the tokens (`data.masking`). The batch of 4096 texts is one for
LAMB.

Run:     zjax train --config=configs/bert_onebit_lamb.py --config.data.source=tokens
         --config.data.path=data/bert
Needs:   tokens in data/bert, made by `zjax data prepare` with the tokenizer of BERT;
         two GPUs or more whose number is even and divides 4096. It pays where the link
         between two halves of them is slow.
Expect:  4.9 times fewer bytes between replicas than with LAMB in bfloat16.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/bert_onebit_lamb"
    config.num_steps = 10_000
    config.global_batch_size = 4_096
    config.microbatch_size = 16

    config.mesh.replica = 2

    config.model.kind = "encoder"
    config.model.num_layers = 24
    config.model.embed_size = 1_024
    config.model.num_heads = 16
    config.model.vocab_size = 30_522
    config.model.max_length = 512
    config.model.norm_eps = 1e-12

    config.optimizer.rule = "onebit_lamb"
    config.optimizer.peak_learning_rate = 4e-3
    config.optimizer.rule.b2 = 0.999
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
