"""Files of a small Llama: read by transformers and by zjax, and run by llama.cpp.

python examples/benchmarks/contest.py examples/benchmarks/exports.py --rows=export_back

Runs on CPUs; the first row needs torch, transformers, compressed-tensors and gguf, the
second llama-cpp-python.
"""

from contestants import on_one_device
from contests import Case, Contest, Row

BACK = on_one_device("files", "zjax", "export_back", timeout_seconds=1_800)
OURS = on_one_device("zjax in float32", "peer", "client_decode", timeout_seconds=900)
TYPES = "q4_0", "q8_0", "f32"
CLIENTS = {
    kind: on_one_device(
        f"llama.cpp {kind}",
        "zjax",
        "client_decode",
        f"--by={kind}",
        timeout_seconds=900,
    )
    for kind in TYPES
}


def get_contest():
    return Contest("Exports", (BACK, OURS, *CLIENTS.values()), (back(), client()))


def back():
    """How far two readers of a file are apart, and how large the file is."""
    cases = [
        Case(
            ours=(BACK.name,),
            peer=1,
            metric=f"worst {metric}",
            unit=unit,
            must=must,
            aim=aim,
            name=metric,
            peer_name=peer_name,
        )
        for metric, unit, must, aim, peer_name in (
            ("difference", "logits", 1e-2, 1e-2, "a logit of 1"),
            ("size", "of the closed form", 1.02, 1.005, "codes, scales, plain arrays"),
            ("tokens", "over equal tokens", None, 1, "all greedy tokens equal"),
        )
    ]
    return Row(
        "export_back",
        "transformers reads what zjax reads from an exported file, and no byte more.",
        tuple(cases),
        theme="memory",
        headline="Exported files: logits by transformers, bytes over closed form",
        higher_is_better=False,
        notes="the worst of ten layouts (w4a16, w8a8, fp8, bf16, q8_0, q5_1, q5_0, "
        "q4_1, q4_0, mxfp4); a Llama of 124M parameters, random weights; 4 rows of 64 "
        "tokens, both sides in float32, without rounding of inputs; with it two "
        "readers of w8a8 and fp8 differ by 0.11 and 0.23, as a last bit that rounds "
        "otherwise spreads",
        by_devices=False,
    )


def client():
    """How fast a file is where its users are."""
    cases = tuple(
        Case(
            ours=(CLIENTS[kind].name,),
            peer=(OURS.name,),
            metric="tokens_per_second",
            unit="tokens/s",
            name=kind,
        )
        for kind in TYPES
    )
    return Row(
        "client_decode",
        "An exported file writes texts in llama.cpp on two CPU cores.",
        cases,
        headline="124M on 2 CPU cores: GGUF in llama.cpp over zjax in float32",
        notes="a Llama of 124M parameters, random weights; a prompt of 32 tokens and a "
        "text of 128, one at a time; llama.cpp has the instructions of the processor "
        "but AMX",
        by_devices=False,
    )
