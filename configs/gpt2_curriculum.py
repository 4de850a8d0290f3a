r"""GPT-2 124M that sees common words first (arXiv:2212.03597, metric voc).

Difficulty grows with the square root of the step over the first 40 % of the steps.

Run:     zjax data analyze --metrics=voc --output=index \
             --config=configs/gpt2_curriculum.py
         zjax train --config=configs/gpt2_curriculum.py
Needs:   one data-centre GPU, or several whose number divides 32.
Expect:  a higher loss than that of shuffled samples at first, and a lower one later.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_curriculum"
    config.num_steps = 2_000
    config.global_batch_size = 32

    config.zero.stage = 1

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.max_length = 1_024

    config.optimizer.peak_learning_rate = 6e-4
    config.optimizer.schedule.num_warmup_steps = 200

    pacing = {"kind": "root", "num_steps": 800}
    config.curriculum.metrics = ({"index": "index/voc.index", "pacing": pacing},)
    return config
