"""A decoder on stages, on matrices in parts and on batch shards, all at once."""

import argparse

import jax

import zjax

SETTINGS = {
    "global_batch_size": 32,
    "num_microbatches": 8,
    "zero.stage": 1,
    "model": {
        "num_layers": 8,
        "embed_size": 128,
        "mlp_size": 384,
        "num_heads": 8,
        "num_kv_heads": 4,
        "norm": "rms_norm",
        "positions": "rotary",
        "activation": "swiglu",
        "use_bias": False,
        "tied_head": False,
        "max_length": 64,
        "remat": "none",
    },
    "optimizer.peak_learning_rate": 1e-3,
}
WAYS = {
    "data": {"mesh": {"data": -1}, "num_microbatches": 1},
    "tensor": {"mesh": {"tensor": 2}},
    "pipeline": {"mesh": {"pipeline": 4}},
    "3d": {"mesh": {"pipeline": 2, "tensor": 2}},
}


def state_bytes(run):
    """Of parameters and optimizer state on the first device."""
    kept = run.state.master, run.state.opt_state
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(kept))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--way", choices=WAYS, default="3d")
    parser.add_argument(
        "--schedule", choices=("gpipe", "1f1b", "interleaved"), default="1f1b"
    )
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 8)  # no effect on a machine with GPUs
    warmup = {
        "num_steps": args.steps,
        "optimizer.schedule.num_warmup_steps": args.steps // 10,
    }
    config = zjax.load_config(SETTINGS, warmup, WAYS[args.way])
    if config.mesh.pipeline > 1:
        config = zjax.load_config(config, {"pipeline": args.schedule})

    model = zjax.make_model(config)
    run = zjax.make_run(config, model, zjax.make_optimizer(config, model))
    sizes = {name: size for name, size in run.mesh.shape.items() if size > 1}
    print(", ".join(f"{name} {size}" for name, size in sizes.items()))
    print(f"state on a device: {state_bytes(run):,} bytes")
    state, last = run.state, args.steps - 1
    with zjax.make_loader(
        config, run.plan.batch_sharding, num_batches=args.steps
    ) as loader:
        for i, batch in enumerate(loader):
            state, metrics = run.step(state, batch)
            if i % 5 == 0 or i == last:
                print(f"step {i}: loss {metrics['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
