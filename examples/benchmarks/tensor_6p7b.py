"""GPT 6.7B on four devices, each matrix split over all of them."""

from contestants import compare_speed, tensor, zjax
from shape import GPT_6P7B

from zjax.bench import Contest, Row

DEVICES = 4
SHAPE = GPT_6P7B
OURS = "zjax tensor 4"
PEERS = {"torch async TP": True, "torch TP": False}


def get_contest():
    contestants = (
        zjax(
            OURS,
            "configs/gpt_6p7b.py",
            f"mesh.tensor={DEVICES}",
            f"microbatch_size={SHAPE.microbatch_size * DEVICES}",
            "global_batch_size=0",
            "model.remat=elementwise",
            "zero.stage=1",
        ),
        *(tensor(name, SHAPE, asynchronous=given) for name, given in PEERS.items()),
    )
    row = Row(
        "tensor_6p7b",
        "GPT 6.7B: tensor parallelism is as fast as torch's, asynchronous or not.",
        compare_speed((OURS,), tuple(PEERS), 1.0, 1.1),
    )
    title = "GPT 6.7B, tensor parallelism, 2 x 4096 tokens per device"
    return Contest(title, contestants, (row,))
