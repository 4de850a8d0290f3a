"""Layers of a mixture of experts, and the metrics that all programs print of them.

A call is the router, the dispatch, the experts and the combination of their outputs,
with the gradients of the tokens and of all parameters, in bfloat16.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import call_timing

CALLS_PER_ROUND = 10
BALANCE_WEIGHT = 0.01
"""Weight of the balance loss, which only layers with a capacity have."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer and its batch.

    Args:
        name: Name of the layer.
        embed_size: Channels of a token.
        mlp_size: Hidden channels of an expert.
        num_experts: Experts.
        top_k: Experts of each token.
        num_tokens: Tokens of a batch.
        is_gated: SwiGLU, without a bound on the tokens of an expert; else GELU, and
            each expert takes as many tokens as it has under even load.
    """

    name: str
    embed_size: int
    mlp_size: int
    num_experts: int
    top_k: int
    num_tokens: int
    is_gated: bool = True

    def metric(self, unit: str) -> str:
        return f"{self.name} {unit}"

    @property
    def flops(self) -> float:
        """FLOPs of the experts' products in both passes, as if no token was dropped."""
        matrices = 3 if self.is_gated else 2
        rows = self.num_tokens * self.top_k
        return 6.0 * rows * matrices * self.embed_size * self.mlp_size

    def describe(self, seconds: list[float]) -> dict[str, dict]:
        """Tokens per second and TFLOP/s."""
        tflops = self.flops / 1e12
        return {
            self.metric("tokens/s"): call_timing.rates(self.num_tokens, seconds),
            self.metric("TFLOP/s"): call_timing.rates(tflops, seconds),
        }


GATED = (
    Layer("Qwen3-30B", 2048, 768, 128, 8, 32_768),
    Layer("d4096 n1024", 4096, 1024, 128, 8, 32_768),
    Layer("Mixtral", 4096, 14336, 8, 2, 16_384),
)
WITH_CAPACITY = tuple(
    Layer(f"{experts} experts top-{top_k}", 2048, 8192, experts, top_k, 8192, False)
    for experts in (16, 64)
    for top_k in (1, 2)
)


def choose_layers(parser: argparse.ArgumentParser) -> tuple[list[Layer], Any]:
    """The layers whose name has what `--only` says, and all flags."""
    parser.add_argument("--only", default="", help="part of the names of layers")
    given = parser.parse_args()
    layers = [x for x in (*GATED, *WITH_CAPACITY) if given.only in x.name]
    return layers, given


def time_layer(
    layer: Layer, ways: Mapping[str, Callable[[], Any]], wait: Callable[[Any], Any]
) -> dict[str, dict]:
    """Metrics of the fastest way to compute a layer."""
    seconds = call_timing.time_fastest(
        ways, wait, layer.name, min_calls=CALLS_PER_ROUND
    )
    return layer.describe(seconds)
