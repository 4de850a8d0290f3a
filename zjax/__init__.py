"""zjax: train Flax models that do not fit on one device.

Start at `zjax.initialize`, which turns a model, an optimizer and a loss into a run, or
at `zjax.Trainer`, which trains from a config file.
"""

from zjax import linen, nnx
from zjax.config import Config, check_config, load_config
from zjax.data import make_loader, make_tokenizer, wrap_batches
from zjax.errors import (
    BenchError,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    NonFiniteError,
    OutputError,
    PackageError,
    PlanError,
    ProcessError,
    StateError,
    ZjaxError,
)
from zjax.estimate.traced import Cost, count
from zjax.generation.generate import generate
from zjax.generation.generator import Generator, Text
from zjax.generation.sampling import Sampling
from zjax.models.adapter import adapt
from zjax.models.build import make_model
from zjax.models.inspect import chosen_experts
from zjax.ops.sparse_self import (
    extend_position_embedding,
    pad_to_block_size,
    unpad_sequence_output,
)
from zjax.optim.build import make_optimizer
from zjax.replicas.state import init_state
from zjax.run.build import Run, adopt_optimizer, make_run
from zjax.run.ending import AfterStep
from zjax.run.fit import fit_plan
from zjax.run.harness import evaluate_with_harness
from zjax.run.initialize import initialize
from zjax.run.saving import restore, save
from zjax.run.step import Step, make_step
from zjax.run.trainer import Trainer
from zjax.run.tune import tune
from zjax.schedule.learning_rate import make_schedule
from zjax.sharding import Plan, abstract_mesh, make_mesh, make_plan
from zjax.sharding.describe import describe_plan, describe_plan_totals
from zjax.stack.forward import loss_of, with_stack
from zjax.train import TrainState
from zjax.typing import Auxiliary, Entry, Loss, Model, Segment, Stack

__all__ = [
    "AfterStep",
    "Auxiliary",
    "BenchError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Cost",
    "DataError",
    "Entry",
    "Generator",
    "Loss",
    "Model",
    "ModelError",
    "NonFiniteError",
    "OutputError",
    "PackageError",
    "Plan",
    "PlanError",
    "ProcessError",
    "Run",
    "Sampling",
    "Segment",
    "Stack",
    "StateError",
    "Step",
    "Text",
    "TrainState",
    "Trainer",
    "ZjaxError",
    "abstract_mesh",
    "adapt",
    "adopt_optimizer",
    "check_config",
    "chosen_experts",
    "count",
    "describe_plan",
    "describe_plan_totals",
    "evaluate_with_harness",
    "extend_position_embedding",
    "fit_plan",
    "generate",
    "init_state",
    "initialize",
    "linen",
    "load_config",
    "loss_of",
    "make_loader",
    "make_mesh",
    "make_model",
    "make_optimizer",
    "make_plan",
    "make_run",
    "make_schedule",
    "make_step",
    "make_tokenizer",
    "nnx",
    "pad_to_block_size",
    "restore",
    "save",
    "tune",
    "unpad_sequence_output",
    "with_stack",
    "wrap_batches",
]
