"""What stages should move, worked out by hand, and the tables that say what they do."""

import re

import optax
import pytest

from tests.support import experts, models, runs
from zjax.observe.collectives import Collective, list_collectives
from zjax.observe.communication import describe_communication, zero_volume
from zjax.settings import schema

MATRICES = 2 * models.WIDTH * models.HIDDEN
BIAS, STORED = 7, 8
HYBRID = schema.Mesh(replica=2, data=4)
TENSOR = schema.Mesh(data=4, tensor=2)
NODES = schema.Zero(
    stage=3,
    min_shard_elements=0,
    replicas=schema.Sharded(secondary_partition=True),
)


@pytest.mark.parametrize(
    ("stage", "num_microbatches", "settings", "volume"),
    [
        (0, 1, {}, 2 * (MATRICES + BIAS)),
        (0, 4, {}, 2 * (MATRICES + BIAS)),
        (1, 4, {}, 2 * (MATRICES + STORED)),
        (2, 1, {}, 2 * (MATRICES + STORED)),
        (2, 4, {}, (4 + 1) * (MATRICES + STORED)),
        (3, 1, {}, 3 * (MATRICES + STORED)),
        (3, 4, {}, 4 * 3 * (MATRICES + STORED)),
        (3, 2, {"min_elements": 8}, 2 * (3 * MATRICES + 2 * BIAS)),
        (0, 1, {"mesh": HYBRID}, 2 * (MATRICES + BIAS)),
        (1, 1, {"mesh": HYBRID}, (2 + 2 / 4) * (MATRICES + STORED)),
        (2, 1, {"mesh": TENSOR}, 2 * (MATRICES / 2 + STORED)),
        (1, 1, {"mesh": schema.Mesh(data=1, tensor=8)}, 0),
        (3, 1, {"mesh": HYBRID, "zero": NODES}, 3 * (MATRICES + STORED) + MATRICES / 4),
    ],
)
def test_volume_of_a_stage(stage, num_microbatches, settings, volume):
    plan = runs.make_small_plan(optax.sgd(0.1), stage, **settings)
    assert zero_volume(plan, num_microbatches) == volume


@pytest.mark.parametrize(("stage", "gathers"), [(0, 0), (1, 1), (2, 1)])
def test_a_step_gathers_what_its_stage_says(stage, gathers):
    """Fails if a stage does not gather parameters, or gathers them twice."""
    step = runs.make_small_step(optax.sgd(0.1), stage)
    found = list_collectives(step.compile(models.make_batch()).as_text())
    volume = sum(each.volume for each in found if each.op == "all-gather")
    assert volume == gathers * (MATRICES + STORED)


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        (schema.Mesh(data=1, expert=8), 0),
        (schema.Mesh(data=2, expert=4), 0),
        (schema.Mesh(data=2, expert=4), 1),
    ],
    ids=str,
)
def test_tokens_of_experts_are_counted_by_themselves(mesh, stage):
    """Fails if a step is said to reduce experts over devices that have others."""
    step = runs.make_small_step(
        optax.sgd(0.1), stage, mesh=mesh, model=experts.make_model()
    )
    found = list_collectives(step.compile(experts.make_batch(0)).as_text())
    text = describe_communication(found, step.plan, 1)
    rows = re.findall(r"(\w[\w ]+?) {2,}([\d,]+) ", text.split("volume")[-1])
    volumes = {name: int(n.replace(",", "")) for name, n in rows}
    tokens, returned = experts.TOKENS // 8 * mesh.expert, 2 * experts.WIDTH + 2
    assert volumes["tokens move to experts and back"] == tokens * (2 * returned + 2)
    moves = next(n for name, n in volumes.items() if name.startswith("this step"))
    # Sums of squares for the norm, the loss and its weight, two elements each.
    small = moves - volumes[f"ZeRO {stage} should move"]
    assert 0 <= small <= 32


def collective(op, elements, axes, *, times=1, overlap=None, is_bounded=True):
    groups = {
        "data": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "both": (tuple(range(8)),),
        "replica": ((0, 4), (1, 5), (2, 6), (3, 7)),
    }
    return Collective(
        op, "bf16", elements, groups[axes], times, is_bounded, overlap, ""
    )


TABLE = """\
what one device sends in a train step, Psi = 2,055 parameters
op                dtype   axes      count   overlap     bytes     Psi
─────────────────────────────────────────────────────────────────────
reduce-scatter    bf16    data          5         4   7.68 kB   2.491
all-reduce        bf16    replica       1         0   1.03 kB   0.500
below 0.001 Psi                         2         2       7 B   0.002
total                                   8         6   8.71 kB   2.994

volume                                  elements     Psi
────────────────────────────────────────────────────────
this step moves over replica and data      6,152   2.994
ZeRO 2 should move for 4 microbatches     14,392   7.003"""


def test_the_table_adds_up_by_kind():
    plan = runs.make_small_plan(optax.sgd(0.1), 2, mesh=HYBRID)
    found = [
        collective("reduce-scatter", 1024, "data", times=4, overlap=3),
        collective("reduce-scatter", 1024, "data", overlap=0),
        collective("all-reduce", 514, "replica"),
        collective("all-reduce", 1, "both", times=2, overlap=1),
    ]
    assert describe_communication(found, plan, 4) == TABLE


def test_no_table_is_wider_than_80_columns():
    plan = runs.make_small_plan(optax.sgd(0.1), 3, mesh=HYBRID)
    found = [collective("collective-permute", 2055, "both", times=96, overlap=1)]
    lines = describe_communication(found, plan, 96).splitlines()
    assert max(map(len, lines)) <= 80


def test_a_loop_of_unknown_length_is_said():
    plan = runs.make_small_plan(optax.sgd(0.1), 0)
    found = [collective("all-reduce", 4, "data", is_bounded=False)]
    text = describe_communication(found, plan, 1)
    assert text.endswith(
        "A loop whose trip count the compiler does not know is counted once."
    )


STAGES = schema.Mesh(pipeline=2, data=4)
JUDGED = """\
volume                                  elements     Psi
────────────────────────────────────────────────────────
this step moves over data                      6   0.003
ZeRO 1 should move for 4 microbatches      4,112   2.001
Transfers between pipeline stages are not compared."""
NOT_JUDGED = """\
volume                      elements     Psi
────────────────────────────────────────────
this step moves over data          6   0.003
Transfers between pipeline stages are not compared.
ZeRO 2 communicates in every pipeline tick; no volume is predicted."""


@pytest.mark.parametrize(("stage", "text"), [(1, JUDGED), (2, NOT_JUDGED)])
def test_pipelines_are_judged_as_far_as_they_can_be(stage, text):
    """Fails if a pipeline is held against what a step without stages moves."""
    plan = runs.make_small_plan(optax.sgd(0.1), stage, mesh=STAGES)
    found = [collective("all-reduce", 3, "data")]
    said = describe_communication(found, plan, 4)
    assert said.partition("\n\n")[2] == text


MESSAGES = """\
volume                                  elements     Psi
────────────────────────────────────────────────────────
this step moves over replica and data          6   0.003
Replicas send messages of their own, in some steps none; no volume is predicted."""


def test_messages_of_replicas_are_not_held_against_a_stage():
    """Fails if a local step seems to miss the gradients that ZeRO reduces."""
    plan = runs.make_small_plan(optax.sgd(0.1), 1, mesh=HYBRID)
    found = [collective("all-reduce", 3, "data")]
    said = describe_communication(found, plan, 1, sends_messages=True)
    assert said.partition("\n\n")[2] == MESSAGES
