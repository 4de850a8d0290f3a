"""One layer of a mixture of experts with all its gradients, one device, bfloat16.

SwiGLU experts that compute all of their tokens, at the shapes of Qwen3-30B-A3B, of
a larger model, and of Mixtral 8x7B: against the compiled block of transformers and a
plain compiled layer, both around torch's `grouped_mm`; the first of them also against
SonicMoE, whose kernels are written for Hopper GPUs. GELU experts with a capacity:
against DeepSpeed's layer.
"""

import moe_cases as cases
from contestants import on_one_device
from contests import Case, Contest, Row

PEERS = {"transformers": "transformers", "torch": "grouped_mm"}
WITH_CAPACITY = "experts top-"


def contest_without_bound():
    """A process for each layer and contestant, so that one may fail alone."""
    contestants, compared = [], []
    for layer in cases.GATED:
        only = f"--only={layer.name}"
        ours = on_one_device(f"zjax {layer.name}", "zjax", "moe_ours", only)
        peers = [
            on_one_device(
                f"{name} {layer.name}", "peer", "moe_torch", f"--how={how}", only
            )
            for name, how in PEERS.items()
        ]
        contestants += ours, *peers
        compared.append(
            Case(
                ours=(ours.name,),
                peer=tuple(peer.name for peer in peers),
                metric=layer.metric("TFLOP/s"),
                unit="TFLOP/s",
                must=1.5,
                aim=2.0,
                name=layer.name,
            )
        )
    row = Row(
        "moe_layer",
        "A mixture layer with gradients is faster than torch's.",
        tuple(compared),
        headline="Mixture layer with gradients: over torch",
        notes="FLOPs of the experts' products alone are counted",
        by_devices=False,
    )
    return contestants, row


def contest_of_kernels(ours):
    """SonicMoE's kernels compile for minutes: one layer is enough."""
    layer = cases.GATED[0]
    peer = on_one_device(
        f"SonicMoE {layer.name}",
        "peer",
        "moe_sonic",
        f"--only={layer.name}",
        timeout_seconds=400,
    )
    case = Case(
        ours=(ours.name,),
        peer=(peer.name,),
        metric=layer.metric("TFLOP/s"),
        unit="TFLOP/s",
        must=1.0,
        name=layer.name,
    )
    row = Row(
        "moe_layer_vs_sonic",
        "A layer of experts with its gradients is as fast as SonicMoE's.",
        (case,),
        notes="FLOPs of the experts' products alone are counted",
        by_devices=False,
    )
    return peer, row


def contest_with_capacity():
    only = f"--only={WITH_CAPACITY}"
    ours = on_one_device("zjax with a capacity", "zjax", "moe_ours", only)
    peer = on_one_device(
        "DeepSpeed MoE", "peer", "moe_deepspeed", only, is_distributed=True
    )
    compared = tuple(
        Case(
            ours=(ours.name,),
            peer=(peer.name,),
            metric=layer.metric("tokens/s"),
            unit="tokens/s",
            must=3.0,
            aim=6.0,
            name=layer.name,
        )
        for layer in cases.WITH_CAPACITY
    )
    row = Row(
        "moe_layer_vs_deepspeed",
        "A mixture layer with gradients is faster than DeepSpeed's.",
        compared,
        headline="Mixture layer with gradients: over DeepSpeed",
        notes="both drop the tokens beyond an even load",
        by_devices=False,
    )
    return [ours, peer], row


def get_contest():
    without, with_capacity = contest_without_bound(), contest_with_capacity()
    sonic, beside_sonic = contest_of_kernels(without[0][0])
    contestants = (*without[0], sonic, *with_capacity[0])
    rows = without[1], beside_sonic, with_capacity[1]
    return Contest("One layer of a mixture of experts", contestants, rows)
