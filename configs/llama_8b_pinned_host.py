"""The shape of Llama 3 8B on few GPUs: master weights and optimizer state on the host.

Run:     zjax train --config=configs/llama_8b_pinned_host.py
Needs:   tokens in data/llama, made by `zjax data prepare`; GPUs of 40 GiB or more whose
         number divides 32, and 120 GB of host memory over all of them.
Expect:  16.1 GB of parameters on each GPU, plus block inputs, activations of one block
         and transfer buffers.
         `zjax plan --config=configs/llama_8b_pinned_host.py --num_devices=1` shows
         where arrays are stored and what a step transfers.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/llama_8b_pinned_host"
    config.num_steps = 20_000
    config.global_batch_size = 32
    config.microbatch_size = 1

    config.zero.stage = 2
    config.zero.offload = "pinned_host"
    config.zero.offload.gradient_memory = "pinned_host"

    config.model.num_layers = 32
    config.model.embed_size = 4_096
    config.model.mlp_size = 14_336
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.vocab_size = 128_256
    config.model.max_length = 4_096
    config.model.norm = "rms_norm"
    config.model.norm_eps = 1e-5
    config.model.positions = "rotary"
    config.model.positions.theta = 500_000.0
    config.model.activation = "swiglu"
    config.model.use_bias = False
    config.model.tied_head = False
    config.model.remat = "full"
    config.data.source = "tokens"
    config.data.path = "data/llama"

    config.optimizer.peak_learning_rate = 1e-4
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
