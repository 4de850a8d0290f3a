"""Decoding with random weights in bfloat16 on one device, and its attention alone.

A Llama of 7B that continues rows of 1,024 tokens: bytes of weights, keys and values per
second, of all rows together, over the bandwidth of a copy; and tokens per second over
those of compiled torch and of transformers. A token of a model of 1.5B in milliseconds.
Qwen3-30B-A3B as the Llama, of whose experts those are counted that the rows choose.
Attention of one token to a cache in pages: over cuDNN, and over a copy.
"""

import itertools

import decode_attention
from contestants import on_one_device
from contests import Case, Contest, Row

BARS = {1: (0.80, 0.90), 16: (0.78, 0.88), 64: (0.75, 0.85)}
"""Shares of a copy that must be reached, and are hoped for, with so many rows."""
MOE_BARS = {1: (0.50, 0.70), 16: (0.45, 0.65)}
OURS = on_one_device("zjax 7B", "zjax", "decode_ours", timeout_seconds=540)
SMALL = on_one_device(
    "zjax 1.5B",
    "zjax",
    "decode_ours",
    "--shape=1p5b",
    "--batches=1",
    timeout_seconds=180,
)
MOE = on_one_device(
    "zjax 30B",
    "zjax",
    "decode_ours",
    "--shape=moe_30b",
    "--batches=1,16",
    timeout_seconds=300,
)
ATTENTION = on_one_device(
    "zjax attention", "zjax", "decode_attention", "--only=ours", timeout_seconds=180
)
CUDNN = on_one_device(
    "cuDNN", "peer", "decode_attention", "--only=cudnn", timeout_seconds=240
)
COPY = on_one_device("copy", "peer", "copy_bandwidth")
# A program for each batch: to compile and tune one takes minutes.
TORCH = {
    batch: on_one_device(
        f"torch b={batch}",
        "peer",
        "decode_torch",
        f"--batches={batch}",
        timeout_seconds=300,
    )
    for batch in BARS
}
TRANSFORMERS = on_one_device(
    "transformers", "peer", "decode_transformers", timeout_seconds=540
)
PUBLISHED_MS, MUST_MS, AIM_MS = 5.0, 1.5, 1.2
"""Milliseconds of a token of one row; DeepSpeed's is of OPT-1.3B on an H100."""


def get_contest():
    notes = (
        "random weights in bfloat16; 64 tokens, in whose middle each row has 1,024; "
        "greedy; weights are counted without the token table"
    )
    large = Row(
        "decode_7b",
        "Decoding reads memory nearly as fast as a copy, and is faster than "
        "transformers.",
        (
            *(over_copy(OURS, batch, bars) for batch, bars in BARS.items()),
            *(over_peer(TRANSFORMERS, batch, 1.2, 1.5) for batch in BARS),
        ),
        headline="Decoding with Llama 7B: share of a copy, over transformers",
        notes=notes,
        by_devices=False,
    )
    compiled = Row(
        "decode_7b_torch",
        "Decoding is faster than compiled torch.",
        tuple(over_peer(peer, batch, 1.03, 1.15) for batch, peer in TORCH.items()),
        headline="Decoding with Llama 7B: over compiled torch",
        notes=notes,
        by_devices=False,
    )
    mixture = Row(
        "decode_moe",
        "Decoding with a mixture reads the experts that are chosen, and little else.",
        tuple(over_copy(MOE, batch, bars) for batch, bars in MOE_BARS.items()),
        headline="Decoding with Qwen3-30B-A3B: share of a copy",
        notes="random weights in bfloat16; 64 tokens, in whose middle each row has "
        "1,024; greedy; weights are counted without the token table, and the experts "
        "that the rows choose, a mean of all tokens and layers",
        by_devices=False,
    )
    programs = OURS, SMALL, MOE, ATTENTION, COPY, CUDNN, *TORCH.values(), TRANSFORMERS
    rows = large, compiled, small_row(), mixture, attention_row()
    return Contest("Decoding", programs, rows)


def small_row():
    """A token of one row of a small model, in whose launches most of the time goes."""
    case = Case(
        ours=(SMALL.name,),
        peer=PUBLISHED_MS,
        metric="batch 1 ms_per_token",
        unit="ms/token",
        must=MUST_MS / PUBLISHED_MS,
        aim=AIM_MS / PUBLISHED_MS,
        peer_name="DeepSpeed, OPT-1.3B, H100, as published",
    )
    return Row(
        "decode_1p5b",
        "A token of a model of 1.5B takes at most 1.5 ms.",
        (case,),
        headline="Decoding with 1.5B parameters: ms a token",
        higher_is_better=False,
        notes="random weights in bfloat16; one row, 1,024 tokens; the number of the "
        "peer is not measured here: DeepSpeed's hybrid engine in float16 (its pull "
        "request 8271), 256 tokens and 128 new ones",
        by_devices=False,
    )


def attention_row():
    """Attention of all shapes over cuDNN, and of one over a copy."""
    shapes = itertools.product(decode_attention.BATCHES, decode_attention.LENGTHS)
    over_cudnn = [
        Case(
            ours=(ATTENTION.name,),
            peer=(CUDNN.name,),
            metric=decode_attention.metric_of(batch, length),
            unit="bytes/s",
            must=1.0,
            name=f"{batch} rows of {length:,}: over cuDNN",
        )
        for batch, length in shapes
    ]
    over_copy = Case(
        ours=(ATTENTION.name,),
        peer=(COPY.name,),
        metric=decode_attention.metric_of(32, 4096),
        peer_metric="copy_bytes_per_second",
        unit="bytes/s",
        must=0.85,
        aim=0.93,
        name="32 rows of 4,096: of a copy",
    )
    return Row(
        "decode_attention",
        "Attention of one token reads pages as fast as cuDNN any cache, or faster.",
        (*over_cudnn, over_copy),
        headline="Attention of one token: over cuDNN, share of a copy",
        notes="32 heads of 128 channels over 8 of keys and values, bfloat16, pages of "
        "64 tokens in shuffled order; cuDNN is the fastest of what runs: a contiguous "
        "cache with and without lengths of rows, and pages; bytes are those of keys "
        "and values",
        by_devices=False,
    )


def over_copy(program, batch, bars):
    """Bytes of a batch over those of a copy."""
    must, aim = bars
    return Case(
        ours=(program.name,),
        peer=(COPY.name,),
        metric=f"batch {batch} bytes/s",
        peer_metric="copy_bytes_per_second",
        unit="bytes/s",
        must=must,
        aim=aim,
        name=f"batch {batch}: of a copy",
    )


def over_peer(peer, batch, must, aim):
    """Tokens of a batch over those of a peer."""
    return Case(
        ours=(OURS.name,),
        peer=(peer.name,),
        metric=f"batch {batch} tokens/s",
        unit="tokens/s",
        must=must,
        aim=aim,
        name=f"batch {batch}: over {peer.name.split()[0]}",
    )
