"""A Llama whose texts repeat, which zjax decodes with drafts and without.

python examples/benchmarks/speculation_ours.py [--quick] [--num_drafts=3] [--ways=plain]

Blocks have random weights. Head and token table make the most likely text go round in
circles of 16 tokens, so that most drafts are right; drawn texts do not repeat.
Both ways write the same prompts in turn; every round has new prompts, as later texts of
a prompt would be proposed the earlier ones. A round is timed from the arrival of all
requests to the last token. Two tokens of nearly equal logits may change places where a
pass reads several: the share of tokens before the first such place is a metric.
"""

import argparse
import dataclasses
import random
import statistics
import time

import call_timing
import jax
import jax.numpy as jnp
import timing
from decode_cases import SHAPES
from decode_ours import RandomDecoder, finish

from zjax.generation.engine import Request
from zjax.generation.generate import make_engine
from zjax.generation.plan import NUM_STEPS, Size
from zjax.generation.sampling import Sampling
from zjax.generation.sequence import Sequence
from zjax.generation.sizes import NUM_CHUNKS, PAGE_SIZE

WARM_UPS, ROUNDS = 3, 5
SPAN, REPETITIONS, NUM_NEW = 48, 4, 256
"""Tokens that a prompt repeats, how often, and new tokens of each text."""
CASES = {"1 text": (1, 0.0), "8 texts": (8, 0.0), "8 drawn texts": (8, 100.0)}
"""Texts at once, and the temperature, which makes drawn tokens nearly uniform."""
CIRCLE = 16
"""Tokens after which the most likely text repeats."""
LOUDNESS = 3_000.0
"""Scale of the token table, which the sum of 32 random blocks does not drown."""
WAYS = "plain", "drafts"


class CirclingDecoder(RandomDecoder):
    """A decoder of random blocks, in whose most likely text each token leads to one.

    Args:
        shape: Shape of the model, of a multiple of `CIRCLE` tokens.
    """

    def __init__(self, shape):
        super().__init__(shape)
        tokens = self.weights.embed["embedding"]["tokens"]
        circles = tokens.reshape(-1, CIRCLE, tokens.shape[1])
        head = self.weights.head["head"]
        head["kernel"] = jnp.roll(circles, 1, axis=1).reshape(tokens.shape)
        self.weights.embed["embedding"]["tokens"] = tokens * LOUDNESS


class Writer:
    """An engine that writes texts of one length.

    Args:
        decoder: Model, as `Generator` takes it.
        num_rows: Texts at once.
        num_new: New tokens of each text.
        num_drafts: Most drafts of a text in a pass; 0 is none.
    """

    def __init__(self, decoder, num_rows, num_new, num_drafts):
        length = SPAN * REPETITIONS + num_new
        several = Size(num_rows, steps=NUM_STEPS)
        sizes = [Size(num_rows), several, Size(num_rows, NUM_CHUNKS)]
        sizes += [Size(num_rows, width=1 + num_drafts)] if num_drafts else []
        num_pages = 1 + num_rows * (1 + -(-length // PAGE_SIZE))
        self.engine = make_engine(decoder, sizes, length, num_pages)
        self.engine.compile()
        self._num_new = num_new

    def write(self, prompts, temperature):
        """Returns the seconds of all texts, and the tokens."""
        sampling = Sampling(max_new_tokens=self._num_new, temperature=temperature)
        requests = [
            Request(dataclasses.replace(sampling, seed=seed))
            for seed in range(len(prompts))
        ]
        start = time.perf_counter()
        rows = [
            self.engine.scheduler.add(Sequence(prompt, self._num_new, request=request))
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        finish(self.engine)
        seconds = time.perf_counter() - start
        return seconds, [row.generated for row in rows]


def draw_prompts(number, num_rows, vocab_size):
    """Prompts of a round, each a span that is repeated."""
    rng = random.Random(number)
    spans = [rng.choices(range(3, vocab_size), k=SPAN) for _ in range(num_rows)]
    return [span * REPETITIONS for span in spans]


def share_before(texts, others):
    """Share of the tokens of texts that come before the first difference."""
    num_equal = 0
    for text, other in zip(texts, others, strict=True):
        pairs = enumerate(zip(text, other, strict=True))
        num_equal += next((i for i, (a, b) in pairs if a != b), len(text))
    return num_equal / sum(map(len, texts))


def measure(shape, num_new, num_drafts, ways):
    """Tokens per second of all cases, in some ways."""
    decoder, metrics = CirclingDecoder(shape), {}
    for name, (num_rows, temperature) in CASES.items():
        numbers = dict(zip(WAYS, (0, num_drafts), strict=True))
        writers = {x: Writer(decoder, num_rows, num_new, numbers[x]) for x in ways}
        seconds, shares = {way: [] for way in ways}, []
        for number in range(WARM_UPS + ROUNDS):
            prompts = draw_prompts(number, num_rows, shape.vocab_size)
            texts = {}
            for way, writer in writers.items():
                spent, texts[way] = writer.write(prompts, temperature)
                seconds[way].append(spent)
            if len(texts) == 2:
                shares.append(share_before(*texts.values()))
        for way in ways:
            timed = seconds[way][WARM_UPS:]
            rates = call_timing.rates(num_rows * num_new, timed)
            metrics[f"{name}, {way} tokens/s"] = rates
            call_timing.note(f"{name}, {way}, all tokens", timed)
        if len(ways) < 2:
            continue
        drafted = writers["drafts"].engine.scheduler.metrics
        metrics[f"{name}, drafts"] = drafted.num_drafts
        metrics[f"{name}, accepted"] = drafted.num_accepted_drafts
        metrics[f"{name}, equal share"] = timing.spread(shares)
        print(
            f"{name}: {drafted.num_accepted_drafts} of {drafted.num_drafts} drafts "
            f"accepted, {statistics.median(shares):.3f} of the tokens before the "
            "first difference",
            flush=True,
        )
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a shape for a CPU")
    parser.add_argument("--num_drafts", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help="by commas")
    given = parser.parse_args()
    shape = SHAPES["tiny" if given.quick else "7b"]
    length = SPAN * REPETITIONS + NUM_NEW
    shape = dataclasses.replace(shape, length=length)
    metrics = measure(shape, NUM_NEW, given.num_drafts, given.ways.split(","))
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
