r"""GPT-2 124M whose context grows, with common words first and fewer tokens per layer.

Attention reaches back over 64 to 1,024 tokens (arXiv:2503.15450), difficulty, the
rarity of the words of a sample, grows with the square root of the step
(arXiv:2212.03597), and each layer except the first and the last trains on 256 to 1,024
tokens of a sample (arXiv:2211.11586), all over the first 40 % of the steps.

Run:     zjax data analyze --metrics=voc --output=index \
             --config=configs/gpt2_data_efficiency.py
         zjax train --config=configs/gpt2_data_efficiency.py
Needs:   one data-centre GPU, or several whose number divides 32.
Expect:  four programs, for 256 to 1,024 tokens per layer; `zjax plan --schedule` draws
         the schedules before the run.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_data_efficiency"
    config.num_steps = 2_000
    config.global_batch_size = 32

    config.zero.stage = 1

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.max_length = 1_024

    config.optimizer.peak_learning_rate = 6e-4
    config.optimizer.schedule.num_warmup_steps = 200

    config.sequence_warmup = "window"
    config.sequence_warmup.pacing.num_steps = 800

    config.random_ltd = "layerwise"
    config.random_ltd.pacing.start = 256
    config.random_ltd.pacing.multiple = 256
    config.random_ltd.pacing.num_steps = 800

    pacing = {"kind": "root", "num_steps": 800}
    config.curriculum.metrics = ({"index": "index/voc.index", "pacing": pacing},)
    return config
