"""Cases of reinforcement learning, and the metrics that all programs print of them.

A step draws `num_samples` texts of each of `num_prompts` random prompts, scores them,
and updates the weights once on all of them.
"""

import argparse
import dataclasses
import sys
import time

from decode_cases import random_prompts
from llama import Llama
from mixtures import Mixture


class Tied(Llama):
    """A Llama whose head is the token table."""

    @property
    def num_params(self) -> int:
        return super().num_params - self.vocab_size * self.embed_size

    def settings(self) -> dict:
        """Arguments of `transformers.LlamaConfig`."""
        return super().settings() | {"tie_word_embeddings": True}


SHAPES = {
    "1p5b": Tied(28, 1536, 8960, 12, 2, 151_936),
    "tiny": Tied(2, 64, 96, 4, 2, 512),
    "moe": Mixture(8, 1024, 512, 8, 2, 128, 32_768, 32, 4, 0, 0),
    "tiny_moe": Mixture(2, 64, 32, 4, 2, 16, 512, 8, 2, 0, 0),
}
"""Qwen2.5-1.5B without biases, a small mixture of experts, and two for a CPU."""
LEARNING_RATE = 1e-6
_START = time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Workload:
    """Texts of a step.

    Args:
        num_prompts: Prompts of a rollout.
        num_samples: Texts of a prompt.
        num_given: Tokens of a prompt.
        num_new: Most tokens of a text; only the end id, which random weights seldom
            draw, ends a text earlier.
        microbatch_size: Texts of a microbatch of the update.
        temperature: What logits are divided by. Those of random weights are small: at 1
            a token is one of 90,000 about equal ones, at 0.25 one of 1,500, as of a
            trained model.
    """

    num_prompts: int = 64
    num_samples: int = 8
    num_given: int = 128
    num_new: int = 512
    microbatch_size: int = 32
    temperature: float = 0.25

    @property
    def num_texts(self) -> int:
        """Texts of a step."""
        return self.num_prompts * self.num_samples

    @property
    def length(self) -> int:
        """Most tokens of a prompt with a text."""
        return self.num_given + self.num_new

    def prompts(self, vocab_size: int, num_steps: int) -> list[str]:
        """Draws the prompts of some steps, as decimal numbers of the tokens."""
        number = self.num_prompts * num_steps
        ids = random_prompts(number, self.num_given, vocab_size - 1)
        return [" ".join(map(str, each)) for each in ids]


def reward(prompt, completion, **row):
    """Returns the share of even tokens: a reward that costs no time."""
    ids = completion.split()
    return sum(int(x) % 2 == 0 for x in ids) / max(len(ids), 1)


def make_parser(shape: str) -> argparse.ArgumentParser:
    """Parser of the flags that all programs have."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    for field in dataclasses.fields(Workload):
        default = field.default
        parser.add_argument(f"--{field.name}", type=type(default), default=default)
    parser.add_argument("--num_warm_ups", type=int, default=1)
    parser.add_argument("--num_steps", type=int, default=2)
    return parser


def workload_of(given: argparse.Namespace) -> Workload:
    """Makes the workload of the command line."""
    names = [field.name for field in dataclasses.fields(Workload)]
    return Workload(**{name: getattr(given, name) for name in names})


def progress(text: str) -> None:
    """Prints how far a program is, and after how many seconds."""
    seconds = time.perf_counter() - _START
    print(f"{seconds:7.1f} s  {text}", file=sys.stderr, flush=True)
