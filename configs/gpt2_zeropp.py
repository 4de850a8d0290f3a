"""GPT-2 with 124 million parameters under ZeRO++, on two nodes with a slow link.

The link between the nodes carries the parameters once per step as int8 and the
gradients as int4: on two nodes of four devices 0.39 float16 elements per
parameter, of 2.63 under ZeRO-3.

Run:     zjax train --config=configs/gpt2_zeropp.py
Needs:   two nodes of the same number of GPUs, whose product divides 32; on one
         machine, 4 or 8 devices stand for two nodes.
Expect:  more tokens/s than ZeRO-3 only where the link between the nodes takes
         most of a step; int4 gradients cost 0.7 % of the loss of a tiny GPT.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_zeropp"
    config.num_steps = 2_000
    config.global_batch_size = 32

    config.mesh.replica = 2
    config.zero.stage = 3
    config.zero.replicas.secondary_partition = True
    config.zero.replicas.quantized_weights = True
    config.zero.replicas.quantized_gradients = True

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.vocab_size = 50_257
    config.model.max_length = 1_024

    config.optimizer.peak_learning_rate = 6e-4
    config.optimizer.schedule.num_warmup_steps = 200
    return config
