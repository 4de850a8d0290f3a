"""An encoder or a decoder with sparse attention reads whole files as single texts."""

import argparse
import pathlib
import sysconfig
import time

import jax
import numpy as np

import zjax
from zjax.ops import sparse

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
MODELS = {"encoder": "bert_sparse_16k.py", "decoder": "gpt_sparse_64k.py"}
TINY = {
    "global_batch_size": 2,
    "microbatch_size": 0,
    "model": {"num_layers": 2, "embed_size": 128},
    "model.num_heads": 2,
    "model.max_length": 2_048,
    "optimizer.peak_learning_rate": 3e-3,
}
MASK = 256  # no byte has this number


def read_documents(length):
    """The files of Python's standard library that are longer than a text, as bytes."""
    files = pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")
    contents = [np.frombuffer(file.read_bytes(), np.uint8) for file in sorted(files)]
    return [content for content in contents if len(content) > length]


def entropy(documents):
    """The loss where nothing is known but how often each byte occurs."""
    counts = np.bincount(np.concatenate(documents))
    shares = counts[counts > 0] / counts.sum()
    return -(shares * np.log(shares)).sum()


def cut_texts(documents, length, size, rng):
    """Places drawn at random from files drawn at random, int32[size, length]."""
    chosen = [documents[i] for i in rng.integers(len(documents), size=size)]
    starts = [rng.integers(len(document) - length + 1) for document in chosen]
    cut = zip(chosen, starts, strict=True)
    return np.stack([document[s : s + length] for document, s in cut]).astype(np.int32)


def mask(texts, rng):
    """Of 15 % of the tokens to restore, 80 % are hidden and 10 % replaced."""
    chosen, fate = rng.random(texts.shape) < 0.15, rng.random(texts.shape)
    tokens = np.where(chosen & (fate < 0.8), MASK, texts)
    others = rng.integers(256, size=texts.shape)
    tokens = np.where(chosen & (fate >= 0.9), others, tokens).astype(np.int32)
    return {"tokens": tokens, "targets": texts, "weights": chosen.astype(np.float32)}


def make_batches(config, documents):
    rng = np.random.default_rng(config.seed)
    size, length = config.global_batch_size, config.data.length
    while True:
        if config.model.kind == "encoder":
            yield mask(cut_texts(documents, length, size, rng), rng)
        else:
            texts = cut_texts(documents, length + 1, size, rng)
            yield {"tokens": texts[:, :-1], "targets": texts[:, 1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="encoder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, help="tokens per text")
    parser.add_argument("--tiny", action="store_true", help="as without a GPU")
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 2)  # no effect on a machine with GPUs
    tiny = args.tiny or jax.default_backend() != "gpu"
    config = zjax.load_config(CONFIGS / MODELS[args.model], TINY if tiny else {})
    length = args.length or config.data.length
    documents = read_documents(length)
    if not documents:
        parser.error(f"no file is longer than --length={length}")
    config = zjax.load_config(
        config,
        {
            "num_steps": args.steps,
            "model.vocab_size": MASK + 1,
            "model.max_length": length,
            "optimizer.schedule.num_warmup_steps": args.steps // 10,
        },
    )
    pattern = sparse.sparse_of(config.model)
    share = sparse.live_fraction(pattern, length) if pattern else 1.0
    print("a tiny" if tiny else "the whole", args.model, "on", jax.devices())
    print(f"{len(documents)} files longer than {length:,} tokens")
    print(f"{share:.1%} of all pairs of tokens see each other")
    print(f"loss of a guess by frequency: {entropy(documents):.3f}")

    batches = make_batches(config, documents)
    model = zjax.make_model(config)
    run = zjax.initialize(model, None, None, next(batches), config)
    state, tokens = run.state, config.global_batch_size * length
    for step in range(args.steps):
        start = time.perf_counter()
        state, metrics = run.step(state, next(batches))
        loss = float(metrics["loss"])
        if step % 20 == 0 or step == args.steps - 1:
            rate = tokens / (time.perf_counter() - start)
            print(f"step {step}: loss {loss:.3f}, {rate:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
