"""Command that learns from rewards of a run's own texts: `zjax rl`."""

import os
import sys

from absl import flags

from zjax import processes
from zjax.cli import commands
from zjax.cli.connection import connected
from zjax.cli.usage import Command
from zjax.rl.trainer import Trainer
from zjax.run.compiler import use_program_cache


def learn(given: flags.FlagValues) -> None:
    """Draws, scores and learns from texts, and goes on from the last checkpoint.

    A run stopped early exits with the status of `zjax train`.
    """
    config = commands.settings(given)
    # `rl.rewards` may name a module in the working directory.
    sys.path.insert(0, os.getcwd())
    with connected(config), processes.hold(config.directory):
        cache = use_program_cache("")
        trainer = Trainer(config)
        try:
            print(f"compiled programs: {cache or 'not cached'}")
            print(trainer.describe())
            trainer.fit()
        finally:
            trainer.close()
    if trainer.exit_status:
        sys.exit(trainer.exit_status)


RL = Command(
    learn,
    "Learns from rewards of a run's own texts: GRPO, PPO and their relatives.",
    "zjax rl --config=quickstart --config.rl.prompts=prompts.jsonl \\\n"
    "    --config.rl.rollout.max_new_tokens=32 \\\n"
    "    --config.rl.rewards=\"[{'function': 'zjax.rl.tasks.sums:reward'}]\"\n"
    "zjax rl --run=runs/rl --config.num_steps=400",
    (commands.RUN,),
)
