"""Two revisions of zjax in turn on one GPU: the same steps, kernels and text.

git archive REVISION zjax zjax_kernels | tar x -C runs/old
python examples/benchmarks/revisions.py --old=runs/old [--only=PART_OF_A_NAME]

Each revision runs a case three times, in turn, each time in a process of its own. A
case is well if the median of the new revision is within the range of the old one.
Settings have the names that both revisions read.
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys

import call_timing
import jax
import jax.numpy as jnp
import numpy as np
import sparse_cases
import sparse_ours

TURNS = 3
SHAPE = {
    "num_layers": 12,
    "embed_size": 1024,
    "mlp_size": 4096,
    "num_heads": 16,
    "num_kv_heads": 16,
    "vocab_size": 50_304,
    "max_length": 1024,
}
ROWS, PROMPT, NEW_TOKENS = 8, 256, 128
HOST = {"zero": {"stage": 2, "memory": "pinned_host"}, "microbatch_size": 4}
FULL = {"model": SHAPE | {"remat": "full"}}
STEPS = {
    "ZeRO-2": {"zero": {"stage": 2}},
    "ZeRO-3": {"zero": {"stage": 3}},
    "offload with clipping": HOST | FULL,
    "offload": HOST | FULL | {"optimizer": {"clip_norm": 0.0}},
    "LoRA": {"zero": {"stage": 0}, "lora": {"rank": 16, "alpha": 32}},
    "mixture of experts": {
        "zero": {"stage": 2},
        "model": SHAPE | {"num_layers": 4, "moe": {"num_experts": 8, "top_k": 2}},
    },
}


def make_step(settings):
    """A training step on random tokens, ready to be called."""
    import zjax

    given = {"global_batch_size": ROWS, "model": SHAPE, "data": {"source": "synthetic"}}
    config = zjax.load_config(given | settings)
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    run = zjax.make_run(config, model, tx, devices=jax.devices()[:1])
    size = ROWS, SHAPE["max_length"] + 1
    tokens = np.random.default_rng(0).integers(SHAPE["vocab_size"], size=size)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch = {name: x.astype(np.int32) for name, x in batch.items()}
    states = [run.state]

    def call():
        state, metrics = run.step(states.pop(), batch)
        states.append(state)
        return metrics, state

    return call


def make_text():
    """Text of a small decoder with random weights in bfloat16."""
    import zjax

    model = zjax.make_model(zjax.load_config({"model": SHAPE}))
    params, state = jax.jit(model.init)(jax.random.key(0))
    decoder = model.bind(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), state)
    size = ROWS // 2, PROMPT
    tokens = np.random.default_rng(0).integers(SHAPE["vocab_size"], size=size)
    tokens = jnp.asarray(tokens, jnp.int32)
    return lambda: zjax.generate(decoder, tokens, max_new_tokens=NEW_TOKENS)


def make_sparse(which):
    case = sparse_ours.LONG[0]
    prepared = sparse_ours.sparse(sparse_ours.plan_of(case))
    calls = sparse_ours.compile_both(lambda: (prepared, sparse_ours.make_inputs(case)))
    return calls[sparse_cases.PASSES.index(which)]


def make_layer(tokens=16_384, embed=2048, mlp=1408, num_experts=64, top_k=6):
    """A layer of experts that drops no token, with its gradients."""
    from zjax.moe.experts import Experts, apply_experts
    from zjax.moe.router import Router, route, router_logits

    router = Router(num_experts=num_experts, top_k=top_k, drop="none")
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape, dtype=jnp.bfloat16):
        x = jax.random.normal(next(keys), shape, dtype)
        return x * jnp.asarray(shape[-2] ** -0.5, dtype)

    kernel = normal(embed, num_experts, dtype=jnp.float32)
    up, down = normal(num_experts, embed, 2 * mlp), normal(num_experts, mlp, embed)
    x, d_out = normal(tokens, embed), normal(tokens, embed)

    def apply(x, kernel, experts):
        routing = route(router_logits(x, kernel), router)
        return apply_experts(x, experts, routing, activation="swiglu")

    def run(*inputs):
        *primals, d_out = inputs
        out, pull = jax.vjp(apply, *primals)
        return out, pull(d_out)

    inputs = x, kernel, Experts(up=up, down=down), d_out
    return functools.partial(jax.jit(run).lower(*inputs).compile(), *inputs)


CASES = {name: functools.partial(make_step, x) for name, x in STEPS.items()}
CASES |= {
    f"sparse, {which}": functools.partial(make_sparse, which)
    for which in sparse_cases.PASSES
}
CASES |= {
    "layer of experts": make_layer,
    "text": make_text,
}


def measure(name, folder):
    """Seconds of a case with the revision in `folder`, in a process of its own."""
    paths = str(folder), os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, __file__, f"--case={name}"]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(name, old, new):
    """Prints both medians, and whether the new one is within the range of the old."""
    found = {old: [], new: []}
    for folder in itertools.chain(*itertools.repeat((old, new), TURNS)):
        found[folder] += measure(name, folder)
    before, after = (statistics.median(found[folder]) for folder in (old, new))
    least, most = min(found[old]), max(found[old])
    print(
        f"{name:22} {before * 1e3:9.3f} ms [{least * 1e3:9.3f}, {most * 1e3:9.3f}]  "
        f"{after * 1e3:9.3f} ms  {after / before:.4f}  "
        f"{'within' if after <= most else 'SLOWER'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--old", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--case", default="")
    given = parser.parse_args()
    if given.case:
        call = CASES[given.case]()
        print(json.dumps(call_timing.time_calls(call, jax.block_until_ready)))
        return
    if given.old is None or not (given.old / "zjax").is_dir():
        parser.error(f"--old={given.old} has no zjax; unpack a revision there")
    new = pathlib.Path(__file__).parents[2]
    for name in CASES:
        if given.only in name:
            compare(name, given.old.resolve(), new)


if __name__ == "__main__":
    main()
