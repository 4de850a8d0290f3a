"""Cases of decoding, and the metrics that all programs print of them.

A token of a batch reads all weights and the keys and values of all rows, in bfloat16.
"""

import argparse
import dataclasses
import random
from collections.abc import Sequence

import call_timing
import timing
from llama import Llama
from mixtures import QWEN3, Mixture

SHAPES = {
    "7b": Llama(mlp_size=11008, num_kv_heads=32, vocab_size=32_000),
    "8b": Llama(),
    "1p5b": Llama(48, 1600, 4352, 25, 25, 50_304),
    "moe_30b": dataclasses.replace(QWEN3, num_layers=48),
    "tiny": Llama(2, 64, 96, 4, 2, 512),
    "tiny_moe": Mixture(2, 64, 32, 4, 2, 16, 256, 8, 2, 4096, 1),
}
"""Llama 2 7B, Llama 3 8B, a Llama of the size of GPT-2 1.5B, Qwen3-30B-A3B, and two for
a CPU."""
NUMBER_BYTES = 2
UNTIMED_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of rows, all of one length, to which tokens are added.

    Args:
        shape: Shape of the model.
        batch: Rows.
        context: Tokens of a row in the middle of a sweep.
        num_tokens: Tokens that a sweep adds to each row.
        num_experts: Experts that a token of all rows reads, a mean over tokens and
            layers; 0 for a model without experts.
    """

    shape: Llama | Mixture
    batch: int
    context: int = 1024
    num_tokens: int = 64
    num_experts: int | float = 0

    @property
    def num_given(self) -> int:
        """Tokens of a row before a sweep."""
        return self.context - self.num_tokens // 2

    @property
    def length(self) -> int:
        """Tokens of a row after a sweep."""
        return self.num_given + self.num_tokens

    @property
    def weight_bytes(self) -> int | float:
        """Bytes of the weights that are read, and of a row of the table for each row.

        Of the experts of a mixture, whose `matmul_params` have `top_k`, the bytes are
        those of `num_experts`.
        """
        shape = self.shape
        numbers = (2 * shape.num_layers + 1 + self.batch) * shape.embed_size
        numbers += shape.matmul_params
        if isinstance(shape, Mixture):
            num_more = shape.num_layers * (self.num_experts - shape.top_k)
            numbers += num_more * shape.expert_params
        return NUMBER_BYTES * numbers

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of all rows in the middle of a sweep."""
        shape = self.shape
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
        return NUMBER_BYTES * per_token * self.context * self.batch

    @property
    def num_bytes(self) -> int | float:
        """Bytes that any program reads for a token of all rows."""
        return self.weight_bytes + self.cache_bytes

    def prompts(self) -> list[list[int]]:
        """Random tokens of all rows before a sweep."""
        return random_prompts(self.batch, self.num_given, self.shape.vocab_size)

    def metric(self, unit: str) -> str:
        return f"batch {self.batch} {unit}"

    def describe(self, seconds: Sequence[float]) -> dict[str, dict | int | float]:
        """Metrics of the seconds per token of several sweeps."""
        seconds = [*seconds]
        return {
            self.metric("ms_per_token"): timing.spread([1e3 * x for x in seconds]),
            self.metric("tokens/s"): call_timing.rates(self.batch, seconds),
            self.metric("bytes/s"): call_timing.rates(self.num_bytes, seconds),
            self.metric("bytes"): self.num_bytes,
        }


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that are all there at the beginning.

    Args:
        num_requests: Requests.
        num_new: Tokens that a request takes, at most.
        min_new: Least tokens of a request: requests spread between, evenly by the
            logarithm and in random order; 0 if all take `num_new`.
        num_given: Tokens of each prompt.
    """

    num_requests: int = 128
    num_new: int = 512
    min_new: int = 0
    num_given: int = 32

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts."""
        return random_prompts(self.num_requests, self.num_given, vocab_size)

    def sizes(self) -> list[int]:
        """New tokens of each request."""
        least, size = self.min_new or self.num_new, self.num_requests
        spread = self.num_new / least
        sizes = [round(least * spread ** ((n + 0.5) / size)) for n in range(size)]
        random.Random(0).shuffle(sizes)
        return sizes

    @property
    def metric(self) -> str:
        """Name of the new tokens per second."""
        least = f"{self.min_new} to " if self.min_new else ""
        return f"{least}{self.num_new} new tokens/s"

    def describe(self, seconds: Sequence[float]) -> dict[str, dict]:
        """New tokens per second, from the seconds of several runs."""
        return {self.metric: call_timing.rates(sum(self.sizes()), [*seconds])}


def random_prompts(
    num_rows: int, length: int, vocab_size: int, seed: int = 0
) -> list[list[int]]:
    """Draws token ids above 2, which models may use for special tokens."""
    rng = random.Random(seed)
    return [rng.choices(range(3, vocab_size), k=length) for _ in range(num_rows)]


def make_parser() -> argparse.ArgumentParser:
    """Parser of the flags that all programs have."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--batches", default="1,16,64", help="rows, by commas")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--num_tokens", type=int, default=64, help="of a sweep")
    parser.add_argument("--num_sweeps", type=int, default=7)
    return parser


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of programs that also measure many requests."""
    parser.add_argument(
        "--continuous", action="store_true", help="many requests in place of batches"
    )
    for name in ("num_requests", "min_new"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Workload, name))
    parser.add_argument("--num_new", default="512", help="of a request, by commas")


def make_workloads(given: argparse.Namespace) -> list[Workload]:
    """Makes the workloads of the command line, the shortest first."""
    sizes = sorted(map(int, given.num_new.split(",")))
    return [Workload(given.num_requests, size, given.min_new) for size in sizes]


def make_cases(given: argparse.Namespace) -> list[Case]:
    """Makes the cases of the command line."""
    shape = SHAPES[given.shape]
    # Some programs warm up with tokens before and behind a sweep.
    length = given.context + given.num_tokens + UNTIMED_TOKENS
    shape = dataclasses.replace(shape, length=length)
    return [
        Case(shape, int(batch), given.context, given.num_tokens)
        for batch in given.batches.split(",")
    ]
