"""LoRA on the shape of Llama 3 8B at 4,096 tokens, on one device of 80 GB.

Adapters of rank 16 on all linear layers of blocks: the peak of device memory with one
sequence, and the speed with as many as are fastest, each against peft with
transformers, compiled whole or by blocks.
"""

from contestants import ONE_DEVICE, compare_speed, on_one_device, zjax
from contests import Case, Contest, Row

SETTINGS = (
    "zero.stage=0",
    "data.source=synthetic",
    "data.path=",
    "lora.rank=16",
    "lora.alpha=32",
    "global_batch_size=0",
)
SMALL = (
    "microbatch_size=1",
    "model.remat=full",
    "model.activation_memory=pinned_host",
    "model.layers_per_scan=1",
    "model.mlp_chunk_tokens=1024",
    "model.loss_chunk_tokens=256",
)
OURS = {
    "zjax with one sequence": SMALL,
    "zjax with 2": ("microbatch_size=2", "model.remat=none"),
    "zjax with 3": ("microbatch_size=3", "model.remat=elementwise"),
}
PEERS = {
    "peft with 1 of compiled blocks": (1, "blocks"),
    "peft with 4 of compiled blocks": (4, "blocks"),
    "peft with 1 compiled": (1, "model"),
}
NOTES = "peft with checkpoints at each layer; random weights in bfloat16"
SMALL_NOTES = f"{NOTES}; zjax with inputs of layers in host memory"


def get_contest():
    contestants = (
        *(
            zjax(
                name,
                "configs/llama_8b.py",
                *SETTINGS,
                *changes,
                environment=ONE_DEVICE,
            )
            for name, changes in OURS.items()
        ),
        *(
            on_one_device(
                name,
                "peer",
                "lora_peft",
                f"--microbatch_size={number}",
                f"--compiled={compiled}",
                timeout_seconds=300,
            )
            for name, (number, compiled) in PEERS.items()
        ),
    )
    one = tuple(name for name, (number, _) in PEERS.items() if number == 1)
    memory = Case(
        ours=("zjax with one sequence",),
        peer=one,
        metric="peak_bytes",
        unit="bytes",
        must=0.9,
        aim=0.7,
    )
    rows = (
        Row(
            "lora_memory",
            "LoRA on 8B needs less device memory than with peft.",
            (memory,),
            headline="LoRA 8B: device memory over peft's",
            higher_is_better=False,
            notes=SMALL_NOTES,
            by_devices=False,
        ),
        Row(
            "lora_speed",
            "LoRA on 8B is faster than with peft.",
            compare_speed(tuple(OURS), tuple(PEERS), 1.3, 1.8),
            headline="LoRA 8B: speed over peft's",
            notes=NOTES,
            by_devices=False,
        ),
    )
    return Contest("Fine-tuning", contestants, rows)
