"""Bytes by link of each program of a run, against what its codecs make of a buffer."""

import dataclasses
import re

import jax
import pytest
from jax.sharding import AbstractMesh

from tests.support import small_run
from zjax.comm.codecs import make_codec, packed_bytes
from zjax.observe.collectives import Collective
from zjax.observe.communication import (
    MESSAGES_NOTE,
    LinkBytes,
    describe_links,
    link_bytes,
)
from zjax.optim.phases import make_phases, make_rounds, programs_at
from zjax.run import local_steps
from zjax.run.batch import abstract_batch
from zjax.run.plan_report import describe_collectives, report_links
from zjax.settings import schema
from zjax.train.exchange import Exchange
from zjax.train.outer_state import make_exchange, make_fragments

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
    expected = exchanged(Exchange(run.plan, make_codec("onebit")))
    assert expected <= between <= expected + SMALL
    times, _, full = found["warm up"]
    assert times == 2
    expected = exchanged(Exchange(run.plan, make_codec("float32")))
    assert full == pytest.approx(expected, abs=SMALL, rel=0.01)
    assert found["a step on average"][-1] == pytest.approx(
        (2 * full + 6 * between) / 8, rel=0.01
    )


def test_local_steps_send_nothing_between_nodes_and_fragments_share_a_line(table):
    found, run = table(*DILOCO)
    assert found["local step"][::2] == (8, 0)
    assert found["local step"][1] > 10_000
    fragments = make_fragments(run.plan.master, 2)
    exchanges = [make_exchange(run.plan, "int4", each) for each in fragments]
    expected = sum(map(exchanged, exchanges))
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
    monkeypatch.setattr(local_steps, "check_warm_up", lambda *_, **__: None)
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
    steps = range(1, 9)
    replicas = make_phases(trainer.config), make_rounds(trainer.config)
    assert names == [name for n in steps for name in programs_at(n, *replicas)]


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
