"""Commands besides training: checkpoints, completion, disks."""

import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint import states
from tests.run.test_ending import fit
from tests.support import huggingface as golden
from tests.support import language
from tests.support.command_line import typed
from tests.support.refusals import config_error
from zjax.checkpoint.store import Store
from zjax.cli import commands, measuring
from zjax.cli.commands import chosen_step, rewind
from zjax.cli.main import COMMANDS
from zjax.cli.usage import completion_script
from zjax.data import source
from zjax.data.evaluation import EvaluationOrder
from zjax.errors import StorageError
from zjax.run import disks
from zjax.run.bench import state_bytes
from zjax.storage.array import DiskArray
from zjax.train.state import TrainState

RL = {"rl": {"objective": "grpo"}}


@pytest.mark.parametrize(("settings", "command"), [({}, "train"), (RL, "rl")])
def test_rewind_names_what_it_sets_aside(tmp_path, capsys, settings, command):
    """Fails if a run goes on from a later step than the chosen one."""
    values, extra = {"w": np.ones(3, np.float32)}, {"config": settings}
    states.save(tmp_path / "checkpoints", values, 1, 2, extra=extra)
    run = f"--run={tmp_path}"
    with config_error(
        "--step='latest' is where a run goes on already; use best or a number"
    ):
        rewind(typed("rewind", run))
    rewind(typed("rewind", run, "--step=1"))
    assert capsys.readouterr().out == (
        f"set aside: {tmp_path}/checkpoints/set-aside-2\n"
        f"`zjax {command}` goes on from step 1; remove what you do not need\n"
    )
    assert Store(str(tmp_path / "checkpoints")).latest() == 1


def test_a_checkpoint_of_hugging_face_is_evaluated_without_a_run(
    tmp_path, monkeypatch, capsys
):
    """Fails if a checkpoint that zjax did not write needs a run, or makes one."""
    monkeypatch.chdir(tmp_path)
    folder = golden.copy("llama", tmp_path / "base")
    words = (
        f"--run={folder}",
        *("--config.data.source=synthetic", "--config.data.length=8"),
        *("--config.global_batch_size=8", "--config.evaluation.num_batches=1"),
        "--config.precision.compute_dtype=float32",
    )
    given = typed("evaluate", *words)
    config = commands.settings_to_evaluate(given)
    commands.evaluate(config, given)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    rows = source.open_rows(config, "validation")
    rows = rows.read(EvaluationOrder(8, len(rows), 8).indices(0))
    run = golden.start(golden.make_config("llama"))
    tokens = jnp.asarray(rows["tokens"])
    scores = language.logits_of(run.bind(run.state), {"tokens": tokens})
    scores = jax.nn.log_softmax(scores)
    picked = np.take_along_axis(np.asarray(scores), rows["targets"][..., None], -1)
    assert found["eval_loss"] == pytest.approx(-picked.mean(), rel=1e-5)
    assert (found["part"], found["step"], found["evaluated_rows"]) == ("raw", 0, 8)


def test_the_best_of_what_is_kept_is_not_the_best_without_a_word(tmp_path, caplog):
    """Fails if a step with a lower loss was not saved, and nobody says so."""
    trainer = fit(tmp_path, "num_steps=3")
    assert trainer.store.steps() == (3,)
    with caplog.at_level("WARNING", logger="absl"):
        assert chosen_step(trainer.store, "best") == 3
    assert caplog.messages == [
        "--step=best takes step 3, the best checkpoint that is kept: the lowest "
        "eval_loss of the run was 28.5 at step 1, which was not saved or not kept; set "
        "evaluation.early_stopping, which saves at each new best, or make "
        "checkpoint.every_steps divide evaluation.every_steps"
    ]


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("begun", "completed"),
    [
        ("tr", "train"),
        ("data a", "analyze"),
        ("train --ds", "--ds_config="),
        ("generate --top", "--top_k= --top_p="),
        ("generate --top_k=3 --see", "--seed="),
        ("train --config.zero.sta", "--config.zero.stage="),
        ("data prepare --val", "--validation_fraction="),
        ("report --config", ""),
    ],
)
def test_bash_completes(begun, completed):
    words = ["zjax", *begun.split()]
    script = completion_script("bash", COMMANDS)
    quoted = " ".join(f"'{word}'" for word in words)
    script += f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _zjax\n"
    script += 'echo "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (completed, "")


def test_zsh_reads_the_script_of_bash():
    script = completion_script("zsh", COMMANDS)
    assert script.startswith("autoload -U +X compinit bashcompinit")
    assert script.endswith(completion_script("bash", COMMANDS))


def test_both_sides_move_all_bytes(tmp_path, monkeypatch):
    """Fails if a side moves less than it is credited with."""
    moved = {"write": 0, "read": 0}
    write, read = DiskArray.write, DiskArray.to_devices

    def counted_write(x, row):
        moved["write"] += x.nbytes
        return write(x, row)

    def counted_read(self):
        moved["read"] += self.nbytes
        return read(self)

    monkeypatch.setattr(DiskArray, "write", counted_write)
    monkeypatch.setattr(DiskArray, "to_devices", counted_read)
    size, rounds = 1 << 20, disks.WARM_UP_ROUNDS + disks.TIMED_ROUNDS
    speed = disks.measure_disks((str(tmp_path),), array_bytes=size, num_arrays=3)
    assert moved == {"write": 3 * rounds * size, "read": 3 * rounds * size}
    for spread in (speed.write, speed.read, speed.raw_write, speed.raw_read):
        assert spread.n == disks.TIMED_ROUNDS
        assert 0 < spread.min <= spread.median <= spread.max
    assert re.search(r"write +\S+ \[.*\] +\S+ \[.*\] +\d", disks.describe_disks(speed))


def test_plain_files_hold_what_is_counted(tmp_path):
    with pytest.raises(StorageError, match="'/nowhere' is not a directory"):
        disks.measure_disks(("/nowhere",))
    files = disks._Files((str(tmp_path),), 1 << 20, num_files=5)
    files.write()
    assert [path.stat().st_size for path in files.files] == [1 << 20] * 5
    files.read()
    files.remove()
    assert not any(path.exists() for path in files.files)


def test_command(tmp_path, monkeypatch, capsys):
    measure = disks.measure_disks

    def small(paths):
        return measure(paths, array_bytes=1 << 20, num_arrays=2)

    monkeypatch.setattr(measuring, "measure_disks", small)
    measuring.bench(typed("bench", f"--nvme={tmp_path}"))
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line.removeprefix("RESULT "))["name"] == str(tmp_path)


def test_two_int4_share_a_byte():
    """NumPy counts a byte for each, and so would the state of a QLoRA run."""
    zero = jnp.int32(0)
    codes = {"codes": jnp.zeros((3, 5), jnp.int4), "scales": jnp.zeros(3, jnp.bfloat16)}
    state = TrainState(zero, zero, codes, opt_state=(), model_state={})
    assert state_bytes(state, jax.local_devices()[0]) == 8 + 3 * 2 + 2 * 4


def test_layouts_belong_to_formats():
    commands.check_layout("hf", "w4a16")
    commands.check_layout("gguf", "q8_0")
    commands.check_layout("peft", "")
    with config_error(
        "--quantize='q8_0' is no layout of --format=hf; use one of w4a16, w8a8, fp8, "
        "mxfp4"
    ):
        commands.check_layout("hf", "q8_0")
    with config_error(
        "--quantize='w8a8' is no layout of --format=peft; use --format=hf, or leave "
        "it out"
    ):
        commands.check_layout("peft", "w8a8")
