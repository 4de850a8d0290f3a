"""BERT-base on texts of 16,384 tokens, with Longformer's block-sparse attention.

Each token attends to its own block, its neighbours and the first block: 1.9 % of all
pairs. `zjax train` masks tokens by itself (`data.masking`); the example makes batches
of its own.

Run:     python examples/long_document/train.py --model=encoder, which reads
         configs/bert_sparse_16k.py
Needs:   one H100 or H200, or several whose number divides 8. Other devices run the
         same blocks without the kernels, slowly.
Expect:  memory linear in the length (all scores in bfloat16 would take 6.4 GB per layer
         and sequence); steps 3.2 times as fast as with dense cuDNN attention, at batch
         size 1 on an H200.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/bert_sparse_16k"
    config.num_steps = 10_000
    config.global_batch_size = 8
    config.microbatch_size = 1

    config.model.kind = "encoder"
    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.vocab_size = 30_522
    config.model.max_length = 16_384
    config.model.norm_eps = 1e-12
    config.model.attention = "sparse"
    config.model.attention.pattern = "bslongformer"
    config.model.attention.block = 64

    config.optimizer.peak_learning_rate = 1e-4
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
