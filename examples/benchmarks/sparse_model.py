"""Whole steps of BERT-base on long texts: Longformer's blocks over all pairs of tokens.

One sequence on one device, forward, backward and AdamW, in bfloat16. Both sides train
the same model but for its attention, which is that of cuDNN where all pairs count.
"""

from contestants import zjax
from contests import Case, Contest, Contestant, Row

CONFIG = "configs/bert_sparse_16k.py"
SIZES = ("microbatch_size=1", "global_batch_size=0", "model.remat=elementwise")
DENSE = ("model.attention=cudnn", "model.attention.pattern=fixed")
WRITTEN = ("model.attention=xla", "model.attention.pattern=fixed")
"""Scores of all pairs are written to memory, as before there were fused kernels."""
BASE = 16_384
LONGEST = "sparse at the cost of dense 16k"


def name_of(attention, length):
    return f"{attention} {length // 1024}k"


def contestants(length):
    lengths = (f"model.max_length={length}", f"data.length={length}")
    for attention, changes in (("dense", DENSE), ("sparse", ())):
        settings = (*SIZES, *lengths, *changes)
        one_device = {"CUDA_VISIBLE_DEVICES": "0"}
        name = name_of(attention, length)
        yield zjax(name, CONFIG, *settings, environment=one_device)


def longest():
    script = ("{python}", "examples/benchmarks/longest_in_budget.py")
    models = (f"--dense={','.join(DENSE)}", f"--written={','.join(WRITTEN)}")
    words = (f"--base={BASE}", *models, CONFIG, *SIZES)
    environment = {
        "CUDA_VISIBLE_DEVICES": "0",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    }
    return Contestant(LONGEST, (*script, *words), "zjax", environment)


def get_contest():
    steps = [
        Case(
            ours=(name_of("sparse", length),),
            peer=(name_of("dense", length),),
            metric="tokens_per_second_per_device",
            unit="tokens/s",
            aim=aim,
            name=f"{length // 1024}k step",
        )
        for length, aim in ((BASE, 3.0), (4 * BASE, 6.0))
    ]
    sequences = [
        Case(
            ours=(LONGEST,),
            peer=BASE,
            peer_name=f"dense, {how}",
            metric=f"length_in_{kind}",
            unit="tokens",
            aim=10.0,
            name=f"longest sequence in equal {kind}",
        )
        for kind, how in (("time", "by cuDNN"), ("memory", "its scores written down"))
    ]
    row = Row(
        "sparse_model",
        "BERT-base: sparse blocks train faster and on longer texts.",
        (*steps, *sequences),
        theme="sparse_attention",
        headline="BERT-base on long texts: sparse over dense",
        notes="the longest sequence is one whose step takes no more time, or no more "
        f"memory by the compiler, than the dense one of {BASE:,} tokens; lengths are "
        "doubled, then the one halfway is tried. Dense attention by cuDNN writes no "
        "scores down and takes no more memory than sparse",
        by_devices=False,
    )
    runs = (*contestants(BASE), *contestants(4 * BASE), longest())
    return Contest("BERT-base on long texts", runs, (row,))
