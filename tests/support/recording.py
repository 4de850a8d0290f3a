"""What runs compute and where they store it, to hold one revision against another.

Each revision records itself, in its own tree and on the same machine. The two files are
then compared bit by bit: a refactoring changes nothing. Recorded are the settings of a
run, its plan, the StableHLO of its programs, the metrics of each step and the state
after them. Checkpoints lie beside the file, and the other tree restores them.

    python -m tests.support.recording write before.json   # in the one tree
    python -m tests.support.recording write after.json    # in the other
    python -m tests.support.recording compare before.json after.json
    python -m tests.support.recording restore before.json   # in the other
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile

NUM_DEVICES = 8
NUM_STEPS = 10
CONFIGS = sorted(pathlib.Path("configs").glob("*.py"))
AXES = (
    {},
    {"tensor": 2},
    {"sequence": 2},
    {"pipeline": 2},
    {"replica": 2},
    {"tensor": 2, "sequence": 2},
    {"pipeline": 2, "tensor": 2},
)
DISK = os.path.join(tempfile.gettempdir(), f"recording_{os.getpid()}")
MEMORIES = (
    {},
    {"offload": {"kind": "pinned_host"}},
    {"offload": {"kind": "pinned_host", "parameter_memory": "pinned_host"}},
    {"offload": {"kind": "nvme", "nvme_paths": ("disk",)}},
)
TINY = {
    "num_layers": 4,
    "embed_size": 32,
    "mlp_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 61,
    "max_length": 32,
}
SETTINGS = {
    "num_steps": 100,
    "global_batch_size": 16,
    "zero": {"min_shard_elements": 64},
    "optimizer": {"schedule": {"num_warmup_steps": 2}, "peak_learning_rate": 0.01},
    "model": TINY | {"dropout_rate": 0.1},
    "data": {"source": "synthetic", "length": 32},
}
HOST = {"offload": {"kind": "pinned_host"}}
BLOCKS = {"offload": {"kind": "pinned_host", "parameter_memory": "pinned_host"}}
LLAMA = {
    "norm": "rms_norm",
    "positions": "rotary",
    "activation": "swiglu",
    "use_bias": False,
    "tied_head": False,
}
SPARSE = {"attention": {"kind": "sparse", "pattern": "fixed", "block": 16}}
EXPERTS = {"moe": {"num_experts": 4, "top_k": 2, "every": 2}}
REPLICAS = {"mesh": {"replica": 2, "data": 4}}


def cases():
    """Runs by name, each a list of changes to `SETTINGS`."""
    for stage in range(4):
        yield f"stage {stage}", {"zero": {"stage": stage}}
        yield (
            f"stage {stage}, tensor and sequence",
            {"zero": {"stage": stage}, "mesh": {"tensor": 2, "sequence": 2}},
        )
        yield (
            f"stage {stage}, pipeline, llama",
            {
                "zero": {"stage": stage},
                "mesh": {"pipeline": 2},
                "model": LLAMA,
                "num_microbatches": 2,
            },
        )
        yield (
            f"stage {stage}, float32, microbatches, ema",
            {
                "zero": {"stage": stage},
                "precision": {"compute_dtype": "float32"},
                "num_microbatches": 2,
                "optimizer": {"ema_decay": 0.9},
            },
        )
    for stage in (0, 1, 2, 3):
        yield f"stage {stage}, host", {"zero": {"stage": stage} | HOST}
    for stage in (1, 3):
        yield f"stage {stage}, blocks on the host", {"zero": {"stage": stage} | BLOCKS}
    yield from {
        "host, tensor, no clipping": {
            "zero": HOST | {"stage": 2},
            "mesh": {"tensor": 2},
            "optimizer": {"clip_norm": float("inf")},
            "precision": {"on_nonfinite": "update"},
        },
        "host, gradients wait there, microbatches": {
            "zero": {
                "stage": 2,
                "offload": {"kind": "pinned_host", "gradient_memory": "pinned_host"},
            },
            "num_microbatches": 2,
        },
        "host, late updates": {
            "zero": {
                "stage": 2,
                "offload": {"kind": "pinned_host", "delay_updates_from": 4},
            }
        },
        "disks": {
            "zero": {"stage": 2, "offload": {"kind": "nvme", "nvme_paths": (DISK,)}}
        },
        "disks, tiles, blocks": {
            "zero": {
                "stage": 3,
                "offload": {
                    "kind": "nvme",
                    "parameter_memory": "nvme",
                    "nvme_paths": (DISK,),
                },
            },
            "model": LLAMA | {"mlp_tiles": 2, "remat": "full"},
        },
        "inputs of blocks on the host": {
            "zero": HOST | {"stage": 2},
            "model": {"activation_memory": "pinned_host", "remat": "full"},
        },
        "float16": {"precision": {"compute_dtype": "float16"}},
        "deterministic": {"deterministic": True},
        "interleaved": {
            "mesh": {"pipeline": 2},
            "pipeline": "interleaved",
            "num_microbatches": 2,
        },
        "gradients of weights apart": {
            "mesh": {"pipeline": 2, "tensor": 2},
            "pipeline": "zb_h1",
            "model": {"remat": "none"},
            "num_microbatches": 2,
        },
        "pipeline and ring": {
            "mesh": {"pipeline": 2, "sequence": 2},
            "model": LLAMA | {"sequence_attention": "ring"},
        },
        "encoder": {"model": {"kind": "encoder"}, "zero": {"stage": 3}},
        "sparse": {"model": SPARSE, "zero": {"stage": 2}},
        "sparse, host": {"model": SPARSE, "zero": HOST | {"stage": 2}},
        "scanned": {"model": {"layers_per_scan": 2, "remat": "elementwise"}},
        "muon": {"optimizer": {"rule": "muon"}, "zero": {"stage": 3}},
        "adafactor": {"optimizer": {"rule": "adafactor"}, "zero": {"stage": 2}},
        "int8 moments": {
            "optimizer": {"rule": {"moment_dtype": "int8"}},
            "zero": {"stage": 1},
        },
        "lamb, host": {"optimizer": {"rule": "lamb"}, "zero": HOST | {"stage": 2}},
        "replica groups": {"mesh": {"replica": 2}, "zero": {"stage": 3}},
        "experts": {"model": EXPERTS, "mesh": {"expert": 2}, "zero": {"stage": 3}},
        "experts, biases, host": {
            "model": {"moe": EXPERTS["moe"] | {"scores": "sigmoid", "bias_rate": 0.1}},
            "zero": HOST | {"stage": 2},
        },
        "latents, llama": {
            "model": LLAMA
            | {
                "num_kv_heads": 4,
                "latent": {"key_rank": 16, "value_size": 8},
                "positions": {"kind": "rotary", "size": 4},
            }
        },
        "windows and soft caps": {
            "model": LLAMA
            | {
                "attention": "xla",
                "window": {"size": 8},
                "attention_soft_cap": 20.0,
                "logit_soft_cap": 10.0,
            }
        },
        "adapters": {"lora": {"rank": 4}, "zero": {"stage": 3}},
        "adapters on codes": {
            "model": LLAMA,
            "lora": {"rank": 4, "quantize": {"kind": "int8", "block_size": 16}},
        },
        "tokens left out": {
            "random_ltd": {
                "kind": "layerwise",
                "pacing": {"start": 16, "multiple": 8, "num_steps": 8},
            }
        },
        "layers left out": {"layer_drop": {"theta": 0.5, "gamma": 0.1}},
        "lengths grow": {
            "sequence_warmup": {
                "kind": "truncate",
                "pacing": {"start": 16, "multiple": 8, "num_steps": 8},
            }
        },
        "1-bit Adam": REPLICAS
        | {
            "optimizer": {"rule": {"kind": "onebit_adam", "freeze_step": 4}},
            "communication": {"codec": "onebit"},
        },
        "0/1 Adam": REPLICAS | {"optimizer": {"rule": "zero_one_adam"}},
        "0/1 Adam, frozen": REPLICAS
        | {"optimizer": {"rule": {"kind": "zero_one_adam", "freeze_step": 3}}},
        "int8 gradients": REPLICAS | {"communication": {"codec": "int8"}},
        "local steps": REPLICAS | {"communication": {"local_steps": {"num_steps": 3}}},
        "local steps, int4, streamed": REPLICAS
        | {
            "communication": {
                "codec": "int4",
                "local_steps": {
                    "num_steps": 4,
                    "num_fragments": 2,
                    "delay": 1,
                    "mixing": 0.5,
                },
            }
        },
        "nodes": {"mesh": {"replica": 2, "data": 4}, "zero": {"stage": 3}},
        "wsd, groups": {
            "optimizer": {
                "schedule": {"kind": "wsd", "decay_fraction": 0.2},
                "groups": [{"pattern": "embedding", "learning_rate_scale": 0.5}],
            }
        },
    }.items()


def user_cases():
    """Runs of a user's Flax model by name: whether it is of Linen, and the stage."""
    for stage in (0, 3):
        yield f"linen, stage {stage}", (True, stage)
        yield f"nnx, stage {stage}", (False, stage)


RUNS = dict(cases())


def start_run(changes):
    """Makes the run of a case."""
    from zjax.config import load_config
    from zjax.models.build import make_model
    from zjax.optim.build import make_optimizer
    from zjax.run.build import make_run
    from zjax.schedule.learning_rate import make_schedule
    from zjax.sharding import plan

    plan.MIN_MOVED_BYTES = 64  # so that arrays of a tiny model are moved
    os.makedirs(DISK, exist_ok=True)
    config = load_config(SETTINGS, changes)
    model = make_model(config)
    tx, schedule = make_optimizer(config, model), make_schedule(config)
    return make_run(config, model, tx, schedule=schedule)


def record_run(changes, directory):
    """Settings, plan, programs, metrics of each step, an evaluation and the state."""
    import zjax
    from zjax.config import describe_config

    with recorded_programs() as programs:
        run = start_run(changes)
        batches = [make_batch(run.config, i) for i in range(NUM_STEPS)]
        record, state = record_steps(run.step, run.state, batches)
        zjax.save(directory, state, run)
    settings = describe_config(run.config).replace(DISK, "disk").splitlines()
    plan = {
        "plan": record_plan(run.plan),
        "text": text_of(zjax.describe_plan(run.plan)),
    }
    return record | plan | {"settings": settings, "programs": sorted(programs)}


def restore_run(changes, directory):
    """The state that a checkpoint of another revision restores to."""
    import zjax

    run = start_run(changes)
    state, _ = zjax.restore(directory, run)
    return record_state(run.step.settle(state))


@contextlib.contextmanager
def recorded_programs():
    """Collects a digest of the StableHLO of each program that is compiled.

    Locations are left out, and functions are numbered in place of named.
    """
    from jax._src import compiler

    found, compile_module = set(), compiler.compile_or_get_cached

    def compile_recorded(backend, computation, *args, **kwargs):
        numbers = {}
        text = computation.operation.get_asm(enable_debug_info=False)
        text = re.sub(
            r"@[\w.]+", lambda m: f"@{numbers.setdefault(m[0], len(numbers))}", text
        )
        found.add(text_of(text))
        return compile_module(backend, computation, *args, **kwargs)

    compiler.compile_or_get_cached = compile_recorded
    try:
        yield found
    finally:
        compiler.compile_or_get_cached = compile_module


def text_of(text):
    """Digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_user_run(is_linen, stage):
    """The same of a model with batch statistics and dropout, trained by optax."""
    import jax
    import optax
    from flax import linen, nnx

    import zjax

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x, train=True):
            x = linen.BatchNorm(use_running_average=not train)(linen.Dense(64)(x))
            x = linen.Dropout(0.1, deterministic=not train)(linen.relu(x))
            return linen.Dense(4)(x)

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 64, rngs=rngs)
            self.norm = nnx.BatchNorm(64, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.last = nnx.Linear(64, 4, rngs=rngs)

        def __call__(self, x):
            return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))

    def loss_fn(model, batch, key):
        return optax.losses.squared_error(model(batch["x"]), batch["y"]).mean()

    def batch(step):
        x, y = (jax.random.normal(jax.random.key(step), (32, n)) for n in (16, 4))
        return {"x": x, "y": y}

    model = Linen() if is_linen else Nnx(nnx.Rngs(0))
    settings = {"zero": {"stage": stage, "min_shard_elements": 0}}
    run = zjax.initialize(model, optax.adamw(1e-2), loss_fn, batch(0), settings)
    record, _ = record_steps(run.step, run.state, [batch(i) for i in range(NUM_STEPS)])
    return record


def record_steps(step, state, batches):
    """Metrics of each step, an evaluation and the state; and the state itself."""
    steps = []
    for batch in batches:
        state, metrics = step(state, batch)
        steps.append({k: digest(v) for k, v in sorted(metrics.items())})
    state = step.settle(state)
    evaluation = {k: digest(v) for k, v in step.evaluate(state, batches[-1]).items()}
    found = {"steps": steps, "evaluation": evaluation, "state": record_state(state)}
    return found, state


def record_state(state):
    """Where each array of a state is, and what it holds."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(k): describe(x) for k, x in leaves}


def make_batch(config, step):
    import numpy as np

    rng = np.random.default_rng(step)
    shape = config.global_batch_size, config.data.length
    tokens = rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    weights = (rng.random(shape) < 0.9).astype(np.float32)
    return batch | {"weights": weights}


def digest(x):
    import numpy as np

    x = np.asarray(x)
    kind = f"{x.shape} {x.dtype}".encode()
    return hashlib.sha256(kind + x.tobytes()).hexdigest()[:16]


def describe(x):
    where = f"{x.sharding.spec} {x.sharding.memory_kind} {type(x).__name__}"
    return f"{x.dtype}{list(x.shape)} {where} {digest(x)}"


def record_plans():
    """Configs on abstract meshes: two of them under every stage, axis and memory."""
    from zjax.config import load_config
    from zjax.errors import ZjaxError
    from zjax.models.build import make_model
    from zjax.optim.build import make_optimizer
    from zjax.sharding import mesh as meshes
    from zjax.sharding.plan import make_plan

    found = {}
    small = [path for path in CONFIGS if path.stem in ("gpt2_124m", "llama_8b")]
    every = itertools.product(small, AXES, MEMORIES, range(4))
    meshes_alone = itertools.product(CONFIGS, AXES, MEMORIES[:1], (3,))
    for path, axes, memory, stage in itertools.chain(every, meshes_alone):
        changes = {"mesh": axes | {"data": -1}, "zero": memory | {"stage": stage}}
        name = f"{path.stem} {axes} {memory} stage {stage}"
        try:
            config = load_config(str(path), changes)
            mesh = meshes.abstract_mesh(config.mesh, NUM_DEVICES)
            model = make_model(config)
            tx = make_optimizer(config, model)
            found[name] = record_plan(make_plan(config, mesh, model, tx))
        except ZjaxError as error:
            found[name] = type(error).__name__
    return found


def record_plan(plan):
    """Where each array is stored, by its role and its path."""
    import jax

    roles = "master", "compute", "grad_sum", "grads", "opt_state", "model_state", "ema"
    lines = [
        f"{role}{jax.tree_util.keystr(keys)} {row.stored_dtype}{list(row.shape)} "
        f"{list(row.stored_shape)} {row.spec} {row.memory}"
        for role in roles
        for keys, row in jax.tree_util.tree_leaves_with_path(getattr(plan, role))
    ]
    return text_of("\n".join(lines))


def work(name, folder, *, restores=False):
    """Records one case, or restores the checkpoint of it."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    if name == "plans":
        return record_plans()
    users = dict(user_cases())
    if name in users:
        return record_user_run(*users[name])
    place = pathlib.Path(folder, re.sub(r"\W+", "_", name))
    return (restore_run if restores else record_run)(RUNS[name], place)


def write(path, only):
    """Records all cases whose name has a text in it."""
    names = ["plans", *RUNS, *dict(user_cases())]
    names = [name for name in names if only in name]
    records = {}
    for name, record in in_processes(names, folder_of(path)):
        records[name] = record
        pathlib.Path(path).write_text(json.dumps(records, indent=1))


def restore(path, only):
    """Restores all checkpoints of a record, and compares states with it."""
    records = json.loads(pathlib.Path(path).read_text())
    names = [name for name in RUNS if only in name and "state" in records.get(name, ())]
    states = dict(in_processes(names, folder_of(path), restores=True))
    wanted = {name: records[name]["state"] for name in names}
    return report(wanted, states)


def folder_of(path):
    """Directory of the checkpoints of a record."""
    return pathlib.Path(path).with_suffix(".checkpoints")


def in_processes(names, folder, *, restores=False):
    """Yields cases, each run in a process; a failed case is recorded as an error.

    A second case of a process would not compile what the first one has compiled.
    """
    context = multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor
    with executor(mp_context=context, max_tasks_per_child=1) as pool:
        jobs = [
            (name, pool.submit(work, name, folder, restores=restores)) for name in names
        ]
        for name, future in jobs:
            try:
                record = future.result()
            except Exception as error:  # of a case, which the comparison then shows
                record = f"{type(error).__name__}: {error}"[:300]
            print(
                f"{name}: {record if isinstance(record, str) else 'done'}", flush=True
            )
            yield name, record


def compare(*paths):
    """Names of what differs, each with its first place."""
    return report(*(json.loads(pathlib.Path(path).read_text()) for path in paths))


def report(before, after):
    """Prints what differs between two records; returns whether anything does."""
    found = list(differences(before, after, ()))
    for path in found:
        print("differs:", ": ".join(path))
    print(f"{len(before)} records, {len(found)} differences")
    return bool(found)


def differences(before, after, path):
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before.keys() | after.keys():
            inner = before.get(name), after.get(name)
            yield from differences(*inner, (*path, str(name)))
    elif isinstance(before, list) and isinstance(after, list):
        for index, inner in enumerate(itertools.zip_longest(before, after)):
            yield from differences(*inner, (*path, str(index)))
    elif before != after:
        yield path


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("write", "restore"):
        parser_of = commands.add_parser(command)
        parser_of.add_argument("path")
        parser_of.add_argument("--only", default="", help="part of a name")
    comparer = commands.add_parser("compare")
    comparer.add_argument("paths", nargs=2)
    given = parser.parse_args()
    if given.command == "write":
        write(given.path, given.only)
    elif given.command == "restore":
        sys.exit(restore(given.path, given.only))
    else:
        sys.exit(compare(*given.paths))


if __name__ == "__main__":
    main()
