"""GPT-2 1.5B under ZeRO-2: speed per device on all devices, over that on one."""

import gpt_1p5b
from contestants import zjax

from zjax.bench import Case, Contest, Row

SETTINGS = (*gpt_1p5b.SETTINGS, "zero.stage=2")
ALL, ONE = "zjax on all devices", "zjax on one device"


def get_contest():
    config = "configs/gpt2_1p5b.py"
    one = zjax(ONE, config, *SETTINGS, environment={"CUDA_VISIBLE_DEVICES": "0"})
    case = Case(
        ours=(ALL,),
        peer=(ONE,),
        metric="tokens_per_second_per_device",
        unit="tokens/s/device",
        must=0.95,
        aim=0.98,
    )
    claim = "GPT 1.5B: more devices, each with as much work, stay as fast under ZeRO-2."
    rows = (Row("weak_scaling", claim, (case,)),)
    contestants = (one, zjax(ALL, config, *SETTINGS))
    return Contest("GPT 1.5B under ZeRO-2", contestants, rows)
