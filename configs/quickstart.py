"""A small GPT on Python's own source: ZeRO-2 on 8 simulated devices of one CPU.

Run:     zjax train --config=configs/quickstart.py --simulated_devices=8
Needs:   any computer with two cores; no GPU, no download.
Expect:  validation loss of about 2.4, 2.2, 2.1 and 2.0 at steps 100, 200, 300 and 400,
         in about four minutes; then text with the look of Python. The training text is
         the standard library, so that numbers and text depend on the Python version.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/quickstart"
    config.num_steps = 400
    config.global_batch_size = 32

    config.zero.stage = 2
    config.precision.compute_dtype = "float32"

    config.model.num_layers = 4
    config.model.embed_size = 128
    config.model.num_heads = 4
    config.model.max_length = 128

    config.optimizer.peak_learning_rate = 2e-3
    config.optimizer.schedule.num_warmup_steps = 40
    config.evaluation.every_steps = 100
    config.checkpoint.every_steps = 100
    return config
