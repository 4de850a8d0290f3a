"""Figures of a plan: devices, schedules of settings, and bytes by link."""

import dataclasses
import re

import jax
import matplotlib.image
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from tests.support import small_run
from zjax.config import load_config
from zjax.data.curriculum import Curriculum
from zjax.data.metric_index import write_index
from zjax.errors import OutputError
from zjax.estimate.trial import Trial
from zjax.models.flops import num_params as count_params
from zjax.observe.collectives import Collective
from zjax.observe.communication import (
    MESSAGES_NOTE,
    LinkBytes,
    describe_links,
    link_bytes,
)
from zjax.ops.codecs import packed_bytes
from zjax.replicas.exchange import exchanges_by_program
from zjax.run import replicas
from zjax.run.batch import abstract_batch
from zjax.run.plan_report import describe_on_gpus, report_plan
from zjax.run.reports import describe_collectives, describe_schedule, report_links
from zjax.schedule.exchange import make_exchanges
from zjax.schedule.training import TrainingSchedule
from zjax.settings import schema


def test_a_step_on_gpus_is_told_as_text():
    trial = Trial(schema.Mesh(), state=2.5e9, activations=1.25e9)
    assert describe_on_gpus(trial) == (
        "a step on GPUs by its traced program, attention as a kernel without scores\n"
        "(an upper estimate: two measured peaks were up to 10 % lower)\n"
        "                      bytes/device\n"
        "──────────────────────────────────\n"
        "state and gradients        2.50 GB\n"
        "activations                1.25 GB\n"
        "total                      3.75 GB"
    )


def test_what_a_step_takes_of_gpus_needs_none(tmp_path):
    """Fails if figures of the formula are not those of the mesh and the model."""
    config = small_run.make_config(tmp_path)
    text = report_plan(config, num_devices=1, picture=str(tmp_path / "plan.png"))
    assert "compiled" not in text
    (count,) = re.findall(r"([\d,]+) parameters\n", text)
    # In float32: parameters in use, gradients, master weights and two moments; and two
    # counters of updates.
    state = 5 * 4 * int(count.replace(",", "")) + 8
    (told,) = re.findall(r"state and gradients +([\d.]+) kB", text)
    assert told == f"{state / 1e3:.2f}"
    tokens, vocabulary, width, hidden = 16 * 16, 61, 16, 32
    # Of the one block, `elementwise` and what computing it again takes; then logits.
    sums, statistics = 2, 2 * 2  # of the softmax of each head; of two norms
    kept = 2 * width + 3 * width + width + hidden + sums + statistics
    scores = 2 * 16 * 3  # in float32 no kernel has attention: three of 4 bytes each
    mask = width / 4  # of dropout, a byte each
    block = kept + 2 * width + hidden + scores + 2 * mask
    # The head keeps its input with two statistics, and the gradient of the output.
    ends = mask + 2 * width + 2
    found = re.findall(r"activations +([\d.]+) kB", text)
    logits = vocabulary * (tokens * 8 + 4 * width)
    total = 4 * tokens * (kept + 2 * block + ends) + logits
    assert found == [f"{total / 1e3:.2f}"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file/plan.png", "File exists"), ("plan.xyz", "Format 'xyz' is not supported")],
)
def test_a_picture_that_cannot_be_drawn_is_named(name, reason, tmp_path):
    (tmp_path / "file").write_text("")
    config = small_run.make_config(tmp_path)
    with pytest.raises(OutputError) as error:
        report_plan(config, num_devices=1, picture=str(tmp_path / name))
    said = str(error.value)
    assert said.startswith(f"output='{tmp_path}/{name}' cannot be drawn ({reason}")
    assert said.endswith("; name a file that can be made, such as plan.png")


def test_a_step_that_moves_its_state_has_no_such_formula(tmp_path):
    settings = ("zero.offload=pinned_host", "model.embed_size=256")
    config = small_run.make_config(tmp_path, *settings)
    text = report_plan(config, num_devices=1, picture=str(tmp_path / "plan.png"))
    assert "rests there" in text
    assert "by its traced program" not in text


def test_closed_form_of_experts_splits_them_over_fewer_devices(tmp_path):
    """Fails if it divides experts, which the mesh has split, by all devices again."""
    config = small_run.make_config(
        tmp_path,
        "model.moe.num_experts=4",
        "mesh.data=2",
        "mesh.expert=4",
        "zero.min_shard_elements=0",
    )
    text = report_plan(config, num_devices=8, picture=str(tmp_path / "plan.png"))
    lines = re.findall(r"^[0-3]  .* ([\d.]+) kB +([\d.]+) kB$", text, re.M)
    assert len(lines) == 4
    for planned, closed_form in lines:
        assert float(closed_form) == pytest.approx(float(planned), rel=0.03)
    active, total = count_params(config.model, active=True), count_params(config.model)
    assert f"\n\na token uses {active:,} of {total:,} parameters\n\n" in text


SETTINGS = {
    "num_steps": 1_000,
    "optimizer": {"schedule": {"num_warmup_steps": 100}},
    "data": {"length": 512},
}
WINDOW = "sequence_warmup=window", "sequence_warmup.pacing.num_steps=400"


def make_config(*overrides):
    return load_config(SETTINGS, *overrides)


@pytest.mark.parametrize(
    ("kind", "name", "tokens"),
    [
        ("window", "attention_window", 16_384_000),
        ("truncate", "sequence_length", 13_115_392),
    ],
)
def test_schedules_are_those_of_the_metrics(kind, name, tokens):
    config = make_config(*WINDOW, f"sequence_warmup={kind}")
    planned = TrainingSchedule(config).planned
    assert list(planned(1)) == ["learning_rate", "consumed_tokens", name]
    found = [planned(step)[name] for step in (1, 200, 399, 400, 1_000)]
    assert found == [64, 256, 448, 512, 512]
    assert planned(1)["learning_rate"] == 0.0
    assert planned(1_000)["consumed_tokens"] == tokens


def test_dropped_tokens_and_layers_are_among_them():
    drops = "random_ltd=span", "layer_drop.theta=0.5", "layer_drop.gamma=1"
    planned = TrainingSchedule(make_config(*drops)).planned
    names = ["kept_tokens", "layer_drop_theta", "consumed_layer_tokens"]
    assert list(planned(1))[2:] == names
    found = [planned(step)["kept_tokens"] for step in (1, 500, 1_000, 1_001)]
    assert found == [128, 256, 384, 512]  # the paper counts steps from 0
    assert [planned(step)["layer_drop_theta"] for step in (1, 100)] == [1.0, 0.5]


def test_difficulties_have_the_names_of_the_metrics(tmp_path):
    """Fails if a file that was renamed has one name before the run, and one in it."""
    write_index(tmp_path / "easy.index", "voc", np.arange(200.0), "abcd")
    pacing = {"start": 5, "num_steps": 400}
    metric = {"index": str(tmp_path / "easy.index"), "pacing": pacing}
    config = make_config({"curriculum": {"metrics": (metric,)}})
    planned, opened = TrainingSchedule(config).planned(200), Curriculum(config, "abcd")
    assert {"difficulty_easy": planned["difficulty_easy"]} == opened.values(200)


def test_listed_values_are_drawn_without_the_index():
    values = {"kind": "discrete", "values": (5, 9), "last_steps": (400,)}
    metric = {"index": "voc.index", "difficulty": "value", "pacing": values}
    config = make_config({"curriculum": {"metrics": (metric,)}})
    planned = TrainingSchedule(config).planned
    assert [planned(step)["difficulty_voc"] for step in (400, 401)] == [5, 9]


def test_layers_of_stages_that_run_whole_count_so():
    """Of 6 layers in a stage, 2 are whole; of 12 without stages, 2."""
    for stages, wanted in ((1, 2 * 512 + 10 * 128), (2, 4 * 512 + 8 * 128)):
        config = make_config("random_ltd=span", f"mesh.pipeline={stages}")
        planned = TrainingSchedule(config, 2).planned(1)
        assert planned["consumed_layer_tokens"] == 32 * wanted


def test_the_table_fits_a_terminal_and_ends_with_the_run(tmp_path):
    config = make_config(*WINDOW)
    lines = describe_schedule(TrainingSchedule(config)).splitlines()
    assert max(map(len, lines)) <= 100
    first, last = lines[2].split(), lines[-1].split()
    assert (first[0], first[-1]) == ("1", "64")
    assert (last[0], last[-2], last[-1]) == ("1,000", "16,384,000", "512")


def test_a_run_with_several_programs_says_which_and_how_often():
    rule = "optimizer.rule=onebit_adam", "optimizer.rule.freeze_step=400"
    text = describe_schedule(TrainingSchedule(make_config(*rule)))
    assert text.splitlines()[0].split("  ")[-1].strip() == "program"
    rows = [line.split() for line in text.splitlines()[2:14]]
    found = [(int(row[0].replace(",", "")) > 400, row[-1]) for row in rows]
    assert set(found) == {(False, "warm_up"), (True, "compressed")}
    assert text.splitlines()[-2:] == [
        "warm_up                   400",
        "compressed                600",
    ]
    assert "program" not in describe_schedule(TrainingSchedule(make_config()))


def test_the_plan_draws_it(tmp_path):
    """With the end by tokens."""
    short = (
        "sequence_warmup.pacing.num_steps=40",
        "optimizer.schedule.num_warmup_steps=10",
    )
    settings = *WINDOW, "num_tokens=1000000", *short
    config = make_config(f"directory={tmp_path}", *settings)
    text = report_plan(config, num_devices=8, schedule=True)
    assert text.endswith(f"picture: {tmp_path}/plan.png and {tmp_path}/steps.png")
    assert "1,015,808" in text and "16,384,000" not in text
    assert matplotlib.image.imread(tmp_path / "steps.png").std() > 0


MESH = ("mesh.replica=2", "mesh.data=4", "zero.stage=1", "model.embed_size=64")
DILOCO = (
    "communication.local_steps.num_steps=4",
    "communication.local_steps.num_fragments=2",
    "communication.local_steps.delay=1",
    "communication.codec=int4",
)
ONE_BIT = ("optimizer.rule=onebit_adam", "optimizer.rule.freeze_step=2")
ZERO_ONE = (
    "optimizer.rule=zero_one_adam",
    "optimizer.rule.freeze_step=3",
    "optimizer.rule.var_update_scaler=1",
    "optimizer.rule.local_step_scaler=1",
)
SMALL = 200
"""Bytes of losses and norms."""
FACTORS = {"B": 1, "kB": 1e3, "MB": 1e6}


@pytest.fixture
def table(tmp_path):
    """Cells of the table by program, sizes in bytes, and the run."""

    def read(*settings):
        run = small_run.make_trainer(tmp_path, *MESH, *settings).run
        text = report_links(run.step, run.config, abstract_batch(run.config, run.plan))
        found = {}
        for line in text.splitlines()[3:]:
            name, *cells = re.split(r"\s{2,}", line)
            sizes = [size.split() for size in cells[-2:]]
            inside, between = (float(x) * FACTORS[unit] for x, unit in sizes)
            found[name] = (*map(int, cells[:-2]), inside, between)
        return found, run

    return read


def exchanged(exchange):
    """Bytes that one replica sends of its buffers in chunks, and back as means."""
    packed = packed_bytes(exchange.codec, exchange.num_elements)
    return 4 * packed  # devices; half of a message goes to the other replica, twice


def test_a_compressed_step_sends_what_its_codec_makes_of_the_buffer(table):
    found, run = table(*ONE_BIT)
    times, _, between = found["compressed"]
    assert times == 6
    by_program = exchanges_by_program(run.plan, make_exchanges(run.config))
    expected = exchanged(by_program["compressed"])
    assert expected <= between <= expected + SMALL
    times, _, full = found["warm up"]
    assert times == 2
    expected = exchanged(by_program["warm_up"])
    assert full == pytest.approx(expected, abs=SMALL, rel=0.01)
    assert found["a step on average"][-1] == pytest.approx(
        (2 * full + 6 * between) / 8, rel=0.01
    )


def test_local_steps_send_nothing_between_nodes_and_fragments_share_a_line(table):
    found, run = table(*DILOCO)
    assert found["local step"][::2] == (8, 0)
    assert found["local step"][1] > 10_000
    by_program = exchanges_by_program(run.plan, make_exchanges(run.config))
    assert sorted(by_program) == ["mean_0", "mean_1"]
    expected = sum(map(exchanged, by_program.values()))
    times, _, between = found["exchange"]
    assert times == 4
    assert between == pytest.approx(expected / 2, rel=0.01)
    assert found["a step on average"][-1] == pytest.approx(between / 2, rel=0.01)
    assert found["end of a round"][0] == 2


def test_a_local_step_is_not_held_against_a_stage_of_zero(tmp_path):
    """Fails if a step that sends nothing reads as a fault."""
    run = small_run.make_trainer(tmp_path, *MESH, *DILOCO).run
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    text = describe_collectives(run.step, run.config, compiled)
    assert MESSAGES_NOTE in text
    assert "should move" not in text
    plain = dataclasses.replace(run.config, communication=schema.Communication())
    assert "should move" in describe_collectives(run.step, plain, compiled)


def results(program, first, *others):
    """What a program gives back: what it was given, in its order."""
    match program.rstrip("_0123456789"):
        case "outer_gradients" | "without_errors":
            return first
        case "mean":
            return first, *others
        case "merge":
            return first, *others[:2]
        case "end_of_round":
            return first, (first, others[0]), *others
    return first, {}


@pytest.mark.parametrize("settings", [DILOCO, ZERO_ONE], ids=["diloco", "zero-one"])
def test_programs_of_a_schedule_are_those_that_run(settings, tmp_path, monkeypatch):
    """Fails if a program is left out or named too often; none is compiled."""
    monkeypatch.setattr(replicas, "check_warm_up", lambda *_, **__: None)
    trainer = small_run.make_trainer(tmp_path, *MESH, *settings)
    step, state, names = trainer.run.step, trainer.run.state, []
    programs = step.executor.programs

    def noting(name):
        def call(state, *args):
            names.append(name)
            return results(name, state, *args)

        return call

    step.executor.programs = {name: noting(name) for name in programs}
    batch = next(iter(trainer.loader))
    for _ in range(8):
        state, _ = step(state, batch)
    at = TrainingSchedule(trainer.config).at
    assert names == [x for step in range(1, 9) for x in at(step).exchange.programs]


MESH_OF_NODES = AbstractMesh((2, 4), ("replica", "data"))


@pytest.mark.parametrize(
    ("op", "groups", "inside", "between"),
    [
        # Of 80 bytes: three of four shares to each of three, once per ring.
        ("all-gather", ((0, 1, 2, 3), (4, 5, 6, 7)), 4 * 60, 0),
        ("all-gather", ((0, 4), (1, 5), (2, 6), (3, 7)), 0, 4 * 40),
        ("all-reduce", (tuple(range(8)),), 3 * 140, 140),
        ("all-to-all", (tuple(range(8)),), 4 * 30, 4 * 40),
        ("collective-permute", ((0, 1), (3, 4), (4, 5), (7, 0)), 80, 80),
    ],
)
def test_bytes_go_inside_a_node_or_between_nodes(op, groups, inside, between):
    each = Collective(op, "f16", 40, groups, 1, True, None, "")
    assert link_bytes([each], MESH_OF_NODES) == LinkBytes(inside, between)


def test_the_table_of_links_as_text():
    sent = {"local step": LinkBytes(8e6, 0.0), "exchange": LinkBytes(0.0, 2e6)}
    assert describe_links(sent, {"local step": 100, "exchange": 10}, 100) == (
        "what one node (replica) sends in one run of each program\n"
        "program             times in a run   inside a node   between nodes\n"
        "──────────────────────────────────────────────────────────────────\n"
        "local step                     100         8.00 MB             0 B\n"
        "exchange                        10             0 B         2.00 MB\n"
        "a step on average                          8.00 MB       200.00 kB"
    )
