"""One process of a small run; `python -m tests.processes.worker <task> <directory>`."""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import zjax
from tests.checkpoint import states
from tests.support import offload, rl_run, squares
from tests.support.command_line import typed
from zjax import processes
from zjax.checkpoint import sums
from zjax.checkpoint.store import Store
from zjax.cli import generating
from zjax.data import buckets, curriculum, metric_index, packing
from zjax.data.draws import WholeRows
from zjax.data.loader import load_draws
from zjax.data.prompts import Prompts
from zjax.data.tokenizer import make_bytes
from zjax.errors import DataError, Problem, ZjaxError
from zjax.generation.engine import Engine
from zjax.models.build import make_model
from zjax.processes import barrier
from zjax.rl.judges import Judges
from zjax.rl.weight_digest import digest_weights
from zjax.run.bench import measure
from zjax.run.build import start_run
from zjax.schedule.pacing import grow
from zjax.serve import Settings
from zjax.serve.service import Service
from zjax.settings import rl as settings_rl
from zjax.settings import schema
from zjax.settings.quantize import Quantize, Rule
from zjax.sharding import plan as plans
from zjax.sharding.mesh import make_mesh

HEARTBEAT_SECONDS = 3


def compute(mesh):
    """A sum over all devices of an array that no device holds whole."""
    split = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.jit(lambda: jnp.arange(32.0).reshape(16, 2) ** 2, out_shardings=split)()
    return jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=replicated(mesh))(x)


def draw_batches(mesh):
    """Batches of a curriculum and of buckets, read by the processes of their rows."""
    tokens = np.arange(1, 1_025)
    index = metric_index.Index("voc", np.arange(63.0), np.arange(63)[::-1])
    pacing = grow(1, 100, 4)
    order = curriculum.CurriculumSampler(
        seed=3,
        clusters=curriculum.Clusters([curriculum.Difficulty(index, pacing, False)]),
        global_batch_size=8,
    )
    config = schema.Config(global_batch_size=8, data=schema.Data(length=16))
    offsets = np.concatenate([[0], np.cumsum([28] * 36)])
    draws = (
        WholeRows(packing.BlockRows(tokens, 16), order, (8,)),
        buckets.Buckets(tokens, offsets, schema.Cut(shortest=4), config),
    )
    split = NamedSharding(mesh, PartitionSpec("data"))
    gather = jax.jit(lambda x: x, out_shardings=replicated(mesh))
    found = []
    for each in draws:
        with load_draws(each, config.data, lambda leaf: split) as batches:
            for _ in range(5):
                whole = gather(next(batches)["tokens"])
                found.append(np.asarray(whole).tolist())
    return found


def replicated(mesh):
    return NamedSharding(mesh, PartitionSpec())


def place(values, rows):
    """Like `states.place`, from values that every process has."""

    def put(x, row):
        if jnp.issubdtype(row.dtype, jax.dtypes.prng_key):
            return jax.jit(lambda: jax.random.key(7), out_shardings=row.stored)()
        stored = np.zeros(row.stored_shape, row.dtype)
        stored[tuple(map(slice, row.shape))] = x
        return jax.make_array_from_callback(
            row.stored_shape, row.stored, stored.__getitem__
        )

    return jax.tree.map(put, values, rows)


def equal(state, values, rows):
    """Compares in the layout of the rows: no process sees the other's shards."""

    def compare(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        return bool(jax.jit(jnp.array_equal)(x, y))

    return all(jax.tree.leaves(jax.tree.map(compare, state, place(values, rows))))


def work(info, directory):
    """Computes, saves, restores onto another stage, reads what the test saved, and
    evaluates."""
    values = states.make_values()
    rows = states.make_rows(values)
    total = compute(rows["step"].stored.mesh)
    store = Store(str(directory / "checkpoints"))
    store.save(5, place(values, rows), rows, extra={"by": info.num_processes})
    store.close()
    other = states.make_rows(values, stage=0)
    trainer = squares.make_trainer(directory / "run", after_step=[ask_alone])
    results = {
        "total": np.asarray(total).tolist(),
        "table": processes.describe_processes(info),
        "saved": equal(store.restore(other)[0], values, other),
        "given": equal(Store(str(directory / "given")).restore(rows)[0], values, rows),
        "drawn": draw_batches(rows["step"].stored.mesh),
        "evaluated": trainer.evaluate()["eval_loss"],
        "stopped": int(trainer.fit().step),
    }
    if info.process_id == 0:
        (directory / "results.json").write_text(json.dumps(results))


def ask_alone(step, state, batch, metrics):
    """Process 1 alone asks to stop."""
    return "stop" if jax.process_index() == 1 else None


def measure_pipeline():
    """The first loss of eight stages, and what else is the same anywhere."""
    model = schema.Model(
        num_layers=8,
        embed_size=32,
        mlp_size=64,
        num_heads=4,
        num_kv_heads=4,
        vocab_size=300,
        max_length=16,
    )
    config = schema.Config(
        global_batch_size=8,
        microbatch_size=2,
        mesh=schema.Mesh(pipeline=8),
        precision=schema.Precision(compute_dtype="float32"),
        model=model,
        data=schema.Data(length=16),
    )
    found = measure(config, num_warm_up=2, num_rounds=1)
    return [found.first_loss, found.tokens_per_second_per_device.n, found.num_devices]


def pipeline(info, directory):
    """Hands streams from the stages of one process to those of the other."""
    results = measure_pipeline()
    if info.process_id == 0:
        (directory / "results.json").write_text(json.dumps(results))


def train_offloaded(memory, directory):
    """Losses of three steps whose state rests elsewhere."""
    zero = {"nvme_paths": (str(directory),)} if memory == "nvme" else {}
    return train(offload.make_config(memory, zero=zero))


def train_rounded(*rules):
    """Losses of three steps on matrices that rules round, in shards of all devices."""
    quantize = Quantize(rules=rules) if rules else None
    return train(offload.make_config("device", 3, quantize=quantize))


def train(config):
    """Losses of three steps on batches that every process has whole."""
    run = offload.start(config)
    state, losses = run.state, []
    for step in range(3):
        batch = jax.tree.map(
            lambda x: jax.make_array_from_callback(
                x.shape, run.plan.batch_sharding(x), x.__getitem__
            ),
            offload.make_batch(step),
        )
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def rest(info, directory):
    """Each process keeps its part of the state on the host, then on a disk."""
    plans.MIN_MOVED_BYTES = 64  # its arrays are small
    memories = ("pinned_host", "nvme")
    losses = [train_offloaded(memory, directory) for memory in memories]
    if info.process_id == 0:
        (directory / "results.json").write_text(json.dumps(losses))


WRITTEN = zjax.Sampling(max_new_tokens=9, temperature=1.5, seed=3, num_samples=2)
"""A token of a pass of the prompt, and eight of a pass of several steps: each pass is
a program."""
GREEDY = zjax.Sampling(max_new_tokens=9)
PROMPTS = [[5, 6, 7], [8], [*range(9, 80)], "abc", [1, 2]]


def start_writing():
    """A run whose heads are split over all devices, and prompts in bytes."""
    model = schema.Model(
        num_layers=1,
        embed_size=16,
        mlp_size=32,
        num_heads=8,
        num_kv_heads=8,
        vocab_size=257,
        max_length=128,
    )
    config = schema.Config(
        global_batch_size=8,
        mesh=schema.Mesh(tensor=8),
        zero=schema.Zero(stage=3, min_shard_elements=64),
        precision=schema.Precision(compute_dtype="float32"),
        model=model,
        data=schema.Data(length=16),
    )
    run = start_run(config, make_model(config), None)
    return zjax.Generator(run, run.state, prompts=Prompts(make_bytes()), max_rows=1)


def write_texts(generator):
    """Ids of texts of all offline calls, one of which is left early."""
    texts = generator.generate(PROMPTS, WRITTEN)
    each = generator.generate_each(PROMPTS * 2, WRITTEN)
    texts += [text for _ in range(3) for text in next(each)]
    each.close()
    texts += generator.generate(PROMPTS[::-1], GREEDY)
    return [text.ids for text in texts]


def write(info, directory):
    """Writes texts on a mesh that spans both processes, and asks for what cannot be.

    Those of `learn` are written by rows that the processes split.
    """
    with start_writing() as generator:
        found = {"texts": write_texts(generator)}
        number = info.process_id
        found["prompts"] = told(lambda: generator.generate([[5], [6 + number]]))
        seeds = zjax.Sampling(temperature=1.0, seed=number)
        found["settings"] = told(lambda: generator.generate([[5]], seeds))
        found["stream"] = told(lambda: generator.submit([5]))
        found["serve"] = told(lambda: Service(generator, Settings()))
    (directory / f"results{number}.json").write_text(json.dumps(found))


LEARNED = (
    "global_batch_size=8",
    "rl.objective=ppo",
    "rl.critic=own",
    "rl.pretraining.weight=0.5",
    "rl.rollout.num_prompts=4",
    "num_steps=3",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=3",
)
"""Two steps on a rollout, and the first step on the next."""


def learn_from_texts(directory):
    """The trainer after three steps, and metrics of the steps without times."""
    trainer = rl_run.fit(directory, *LEARNED)
    names = ("loss", "reward", "grad_norm", "completion_length", "ratio", "sampler_kl")
    names += "value_loss", "critic_grad_norm", "pretraining_loss"
    rows = [[row[name] for name in names] for row in rl_run.records(directory)]
    return trainer, rows


def learn(info, directory):
    """Draws, scores and learns together; then a reward fails on process 0 alone."""
    trainer, rows = learn_from_texts(directory / "run")
    digest = digest_weights(trainer.state, trainer.run.plan)
    missing = settings_rl.FunctionReward(function="tests.support.rl_rewards:missing")
    failed = told(Judges(settings_rl.Rl(rewards=(missing,)), trainer.run).start)
    found = {"rows": rows, "digest": digest, "failed": failed}
    (directory / f"results{info.process_id}.json").write_text(json.dumps(found))


ROUNDED = Rule(weights="int3", group_size=16)


def round_weights(info, directory):
    """Trains on rounded matrices."""
    losses = train_rounded(ROUNDED)
    (directory / f"results{info.process_id}.json").write_text(json.dumps(losses))


def fail_to_save(info, directory):
    """One process cannot hold the directory, begin a save, or write its part of it."""
    (directory / "file").write_text("")
    batches = itertools.repeat({"x": np.zeros(8, np.float32)})
    settings = ("num_steps=5000", "checkpoint.every_steps=2")
    trainer = squares.make_trainer(directory / "run", *settings, batches=batches)
    beyond = str(directory / "file" / "checkpoints")
    held = told(lambda: processes.hold(beyond).__enter__())
    whole, trainer.store = trainer.store, Store(beyond)
    begun = told(trainer.save)
    trainer.store = whole
    if info.process_id == 1:
        sums.write_sums = fill
    written = told(trainer.fit)
    results = {"held": held, "begun": begun, "written": written, "step": trainer.step}
    (directory / f"results{info.process_id}.json").write_text(json.dumps(results))


def type_texts(directory, *more):
    """`zjax generate` on the prompts and the checkpoint of a directory."""
    words = f"--model={directory / 'llama'}", f"--file={directory / 'prompts.txt'}"
    words += "--max_new_tokens=9", "--max_rows=1"
    generating.generate(typed("generate", *words, *more))


def generate(info, directory):
    """Goes on with a file of texts, then prints texts."""
    connected = []

    def connect(config):
        connected.append(config)
        return contextlib.nullcontext(info)

    generating.connected = connect
    type_texts(directory, f"--output={directory / 'both.jsonl'}")
    type_texts(directory)
    assert len(connected) == 2


def compile_when_run(engine):
    """Compiles no pass ahead: most passes never run."""


TOGETHER = work, round_weights, learn, write, generate, fail_to_save
"""Tasks that need no processes of their own: imports take longer than most of them."""


def live(info, directory):
    """Does the tasks of `TOGETHER`, each in a folder of its name."""
    Engine.compile = compile_when_run
    for task in TOGETHER:
        task(info, directory / task.__name__)


def told(act):
    """The error of a call; a barrier that gives up would raise another one."""
    try:
        act()
    except ZjaxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fill(*_):
    raise OSError(28, "No space left on device")


def part_for_long(info, directory):
    """Process 1 comes to a collective later than Gloo waits for a connection."""
    mesh = make_mesh(schema.Mesh(data=4, tensor=2))
    barrier.connect(mesh)
    if info.process_id == 1:
        time.sleep(33)
    whole = np.ones((4, 2), np.float32)
    split = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    x = jax.make_array_from_callback(whole.shape, split, whole.__getitem__)
    for axes, total in ((0, 4), (1, 2), (None, 8)):
        found = jax.jit(lambda x, axes=axes: jnp.sum(x, axes))(x)
        assert float(jnp.ravel(found.addressable_data(0))[0]) == total


def use_together(info, directory):
    """Works together until something happens to the other process."""
    mesh = states.make_rows(states.make_values())["step"].sharding.mesh
    while True:
        jax.block_until_ready(compute(mesh))


def kill(info, directory):
    """Process 1 is killed at work."""
    if info.process_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    use_together(info, directory)


def fail(info, directory):
    """Process 1 fails while process 0 waits for it."""
    if info.process_id == 1:
        raise ValueError("no more tokens\nin this test")
    signal.pause()


def refuse(info, directory):
    """Process 1 ends as the command line does for a mistake of the user."""
    if info.process_id == 1:
        processes.record_failure(
            DataError(Problem("data.path", "x", "is gone", "look"))
        )
        sys.exit(2)
    signal.pause()


def freeze(info, directory):
    """Process 1 stops to answer."""
    if info.process_id == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()


def leave(info, directory):
    """Both stop when they are told to."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)  # unlike pause, it misses no signal that came before
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    multihost_utils.sync_global_devices("both can be told")
    print("ready", end="")
    os.write(sys.stdout.fileno(), b"words of C++, which is not asked to wait\n")
    print()
    os.read(reader, 1)


if __name__ == "__main__":
    task, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    jax.config.update("jax_num_cpu_devices", 4)
    settings = schema.Processes(heartbeat_seconds=HEARTBEAT_SECONDS)
    seed = int(os.environ["ZJAX_PROCESS_ID"]) if task == "differ" else 0
    config = schema.Config(seed=seed, directory=str(directory), processes=settings)
    info = processes.start(config)
    globals()[task](info, directory)
    processes.finish(info)
