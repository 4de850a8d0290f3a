"""The shape of LLaMA 30B on one GPU: optimizer state on disks, parameters on the host.

Run:     zjax train --config=configs/llama_30b_nvme.py
Needs:   tokens in data/llama, made by `zjax data prepare`; one GPU, 215 GB of host
         memory, and 390 GB free under zero.offload.nvme_paths: name a directory on
         each of your disks, and measure them with `zjax bench --nvme=DIRECTORY,...`.
Expect:  325 GB of state on the disks, 65 GB of parameters and 130 GB of gradient sums
         on the host. A step reads and writes the whole state, about a minute at 6 GB/s
         each way, so the batch is large. Every microbatch streams the parameters
         twice, so microbatches are large.
         `zjax plan --config=configs/llama_30b_nvme.py --num_devices=1` shows where
         arrays are stored and what a step transfers.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/llama_30b_nvme"
    config.num_steps = 20_000
    config.global_batch_size = 128
    config.microbatch_size = 16

    config.zero.stage = 2
    config.zero.offload = "nvme"
    config.zero.offload.parameter_memory = "pinned_host"
    config.zero.offload.gradient_memory = "pinned_host"
    config.zero.offload.nvme_paths = ("/mnt/nvme0/zjax",)

    config.model.num_layers = 60
    config.model.embed_size = 6_656
    config.model.num_heads = 52
    config.model.vocab_size = 32_000
    config.model.max_length = 2_048
    config.model.norm = "rms_norm"
    config.model.norm_eps = 1e-6
    config.model.positions = "rotary"
    config.model.positions.theta = 10_000.0
    config.model.activation = "swiglu"
    config.model.use_bias = False
    config.model.tied_head = False
    config.model.remat = "full"
    config.data.source = "tokens"
    config.data.path = "data/llama"

    config.optimizer.peak_learning_rate = 1e-4
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
