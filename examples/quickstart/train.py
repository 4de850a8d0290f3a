"""The parts of a training run, one line each: what `zjax.Trainer` puts together."""

import argparse
import pathlib

import jax

import zjax

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    num_steps = parser.parse_args().steps

    jax.config.update("jax_num_cpu_devices", 8)  # no effect on a machine with GPUs
    config = zjax.load_config(CONFIG, "zero.stage=3")
    mesh = zjax.make_mesh(config.mesh)
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    plan = zjax.make_plan(config, mesh, model, tx)
    print(zjax.describe_plan_totals(plan))

    state = zjax.init_state(jax.random.key(config.seed), model, tx, plan, config)
    step = zjax.make_step(model, tx, plan, config)
    with zjax.make_loader(config, plan.batch_sharding, num_batches=num_steps) as loader:
        for i, batch in enumerate(loader):
            state, metrics = step(state, batch)
            if i % 20 == 0 or i == num_steps - 1:
                print(f"step {i}: loss {metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
