"""GPT-2 with 124 million parameters on replicas that exchange outer gradients (DiLoCo).

Two replicas take 40 steps on their own and then send each other half a byte per
parameter, where data parallelism would send two bytes in every step. Four fragments of
the layers go at different steps, and five more steps run while a fragment is on its way
(Streaming DiLoCo, arXiv:2501.18512). MuLoCo is --config.optimizer.rule=muon.

Run:     zjax train --config=configs/gpt2_diloco.py
Needs:   an even number of GPUs that divides 32, joined by a link of any speed.
Expect:  the loss of gpt2_124m.py only after more tokens; not measured at full length.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_diloco"
    config.num_steps = 2_000
    config.global_batch_size = 32

    config.mesh.replica = 2
    config.zero.stage = 1

    config.communication.codec = "int4"
    config.communication.local_steps.num_steps = 40
    config.communication.local_steps.num_fragments = 4
    config.communication.local_steps.delay = 5
    config.communication.local_steps.mixing = 0.5

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.vocab_size = 50_257
    config.model.max_length = 1_024

    config.optimizer.peak_learning_rate = 6e-4
    config.optimizer.schedule.num_warmup_steps = 200
    return config
