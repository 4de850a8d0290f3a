"""Block-sparse attention against FlexAttention and the dense attention of cuDNN.

One sequence, 16 heads, blocks of 128 tokens, bfloat16. cuDNN is the faster of what JAX
and torch make of it; FlexAttention is compiled for every size, with the fastest of the
sizes of tiles that torch tries (`max-autotune`), and reads a mask only in the blocks
that it cuts. Its mask is either that of causality, or a function that looks the layout
up, as torch documents it for any layout; the rows without `_mask` take the fastest of
all, and what the bulk copy engine brings.
"""

import sparse_cases as cases
from contests import Case as Comparison
from contests import Contest, Contestant, Row
from sparse_cases import Case

OURS = "zjax_kernels"
MASK = "FlexAttention with a mask"
FLEX = ("FlexAttention", "FlexAttention by TMA", MASK)
CUDNN = ("cuDNN in JAX", "cuDNN in torch")
FOLDER = "examples/benchmarks"
RATE = "calls/s"
HEADLINES = {
    "sparse_fwd_vs_flex": "Sparse attention, forward: over FlexAttention",
    "sparse_vs_dense_64k": "BigBird, 64k tokens: over dense attention of cuDNN",
}


def contestant(name, kind, script, *words):
    command = ("{python}", f"{FOLDER}/{script}.py", *words)
    return Contestant(name, command, kind, timeout_seconds=590)


def compare(case, which, peer, must, aim, *, peer_case=None, unit=RATE, name=""):
    suffix = "" if unit == RATE else f" {unit}"
    return Comparison(
        ours=(OURS,),
        peer=peer,
        metric=case.metric(which) + suffix,
        peer_metric=(peer_case or case).metric(which) + suffix,
        unit=unit,
        must=must,
        aim=aim,
        name=name or case.name,
    )


def row(name, claim, found, **settings):
    return Row(
        name,
        claim,
        tuple(found),
        theme="sparse_attention",
        headline=HEADLINES.get(name, ""),
        by_devices=False,
        **settings,
    )


def against_flex():
    for name, which, must, aim in (
        ("sparse_fwd_vs_flex", "forward", 2.0, 3.0),
        ("sparse_fwdbwd_vs_flex", "both", 1.8, 2.5),
    ):
        passes = {"forward": "Forward pass", "both": "Both passes"}[which]
        for peers, suffix, given in (
            (FLEX, "", ""),
            ((MASK,), "_mask", " with a mask"),
        ):
            found = [compare(each, which, peers, must, aim) for each in cases.TUNED]
            claim = f"{passes}: faster than FlexAttention{given}."
            yield row(f"{name}{suffix}", claim, found)


def against_dense():
    for which, must, aim in (("forward", 0.97, 1.05), ("backward", 0.85, 1.0)):
        found = compare(cases.BOTH_WAYS, which, CUDNN, must, aim, unit="TFLOP/s")
        claim = f"With all blocks live, {which} is as fast as cuDNN."
        short = {"forward": "fwd", "backward": "bwd"}[which]
        yield row(f"sparse_dense_{short}", claim, [found])
    for length, must, aim in ((2**14, 6, 8), (2**16, 25, 35), (2**17, 45, 65)):
        case, dense = (Case(name, length, 128) for name in ("bigbird", "dense"))
        found = compare(case, "both", CUDNN, must, aim, peer_case=dense)
        claim = f"BigBird over causal dense attention, {length // 1024}k tokens."
        name = f"sparse_vs_dense_{length // 1024}k"
        yield row(name, claim, [found])


def roofline():
    for which, must, aim in (("forward", 0.65, 0.85), ("backward", 0.5, 0.75)):
        found = [
            compare(
                Case(layout, length, 128),
                which,
                CUDNN,
                must,
                aim,
                peer_case=cases.BOTH_WAYS,
                unit="TFLOP/s",
            )
            for layout in cases.CAUSAL
            for length in (2**14, 2**16)
        ]
        claim = f"Pairs cost what they cost in dense attention: {which}."
        short = {"forward": "fwd", "backward": "bwd"}[which]
        yield row(f"sparse_roofline_{short}", claim, found)


def others():
    sliding = Case("sliding", 2**15, 64)
    found = [
        compare(sliding, which, CUDNN[:1], 1.0, 1.2, name=f"{sliding.name}, {which}")
        for which in cases.PASSES
    ]
    claim = "Windows of 1024, 64 heads over 8: as fast as cuDNN's."
    yield row("sparse_swa", claim, found)
    name = cases.SMALL.name
    found = [
        compare(
            cases.SMALL, which, CUDNN, 2.0, 1.3, unit="seconds", name=f"{name}, {which}"
        )
        for which in cases.PASSES
    ]
    yield row(
        "sparse_block16",
        "Blocks of 16 cost at most 2 x their share of dense.",
        found,
        higher_is_better=False,
        notes="the peer's time is that of dense attention times the density",
    )


def get_contest():
    contestants = (
        contestant(OURS, "zjax", "sparse_ours"),
        contestant(FLEX[0], "peer", "sparse_torch", "--how=blocks"),
        contestant(FLEX[1], "peer", "sparse_torch", "--how=blocks", "--tma"),
        contestant(MASK, "peer", "sparse_torch", "--how=mask"),
        contestant(CUDNN[0], "peer", "sparse_ours", "--dense"),
        contestant(CUDNN[1], "peer", "sparse_torch", "--how=dense"),
    )
    rows = (*against_flex(), *against_dense(), *roofline(), *others())
    return Contest("Block-sparse attention", contestants, rows)
