"""A decoder reads long texts, each of which all devices share."""

import argparse

import jax
import jax.numpy as jnp

import zjax

SETTINGS = {
    "global_batch_size": 8,
    "microbatch_size": 1,
    "zero.stage": 3,
    "model": {
        "num_layers": 2,
        "embed_size": 128,
        "mlp_size": 384,
        "num_heads": 8,
        "num_kv_heads": 2,
        "norm": "rms_norm",
        "positions": "rotary",
        "activation": "swiglu",
        "use_bias": False,
        "remat": "full",
        "layers_per_scan": 1,
    },
    "optimizer.peak_learning_rate": 3e-3,
}


def activation_bytes(config):
    """What a step takes on one device besides its state, by the compiler."""
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    plan = zjax.make_plan(config, zjax.make_mesh(config.mesh), model, tx)
    step = zjax.make_step(model, tx, plan, config)
    shape = (config.global_batch_size, config.data.length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    compiled = step.compile({"tokens": tokens, "targets": tokens})
    return compiled.memory_analysis().temp_size_in_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--length", type=int, default=1_024, help="tokens per text")
    parser.add_argument("--way", choices=("ulysses", "ring"), default="ring")
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 8)  # no effect on a machine with GPUs
    size = len(jax.devices())
    whole = zjax.load_config(
        SETTINGS,
        {
            "num_steps": args.steps,
            "model.max_length": args.length,
            "optimizer.schedule.num_warmup_steps": args.steps // 10,
        },
    )
    split = {"mesh": {"data": 1, "sequence": size}, "global_batch_size": 1}
    split["model.sequence_attention"] = args.way
    config = zjax.load_config(whole, split)

    before, after = map(activation_bytes, (whole, config))
    print("bytes of activations per device, by the compiler")
    print(f"a text on each of {size} devices: {before:,}")
    print(f"a text on all of them: {after:,}, 1/{before / after:.1f}")

    model = zjax.make_model(config)
    run = zjax.make_run(config, model, zjax.make_optimizer(config, model))
    state, last = run.state, args.steps - 1
    with zjax.make_loader(
        config, run.plan.batch_sharding, num_batches=args.steps
    ) as loader:
        for i, batch in enumerate(loader):
            state, metrics = run.step(state, batch)
            if i % 10 == 0 or i == last:
                print(f"step {i}: loss {metrics['loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
