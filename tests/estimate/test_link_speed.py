"""What is sent over links: predicted bytes against compiled programs."""

import collections
import dataclasses
import re

import pytest

from tests.support import small_run, tensor
from tests.support.refusals import config_error
from zjax.config import load_config
from zjax.errors import ConfigError, PlanError, Problem
from zjax.estimate import link_speed
from zjax.estimate.activations import activation_bytes, sent_bytes
from zjax.estimate.exchanges import describe_exchanges
from zjax.estimate.link_speed import (
    Prediction,
    describe_predictions,
    parse_speed,
    report_link,
)
from zjax.estimate.methods import methods_of, sent_per_step
from zjax.estimate.tables import describe_stages, kept_rows
from zjax.estimate.trial import weigh
from zjax.models.build import make_model
from zjax.observe.collectives import bytes_leaving_node, list_collectives
from zjax.ops.tokens import EXCHANGED
from zjax.optim.build import make_optimizer
from zjax.run.batch import abstract_batch
from zjax.run.bench import state_bytes
from zjax.run.fit import check_device_memory
from zjax.run.plan_report import report_plan
from zjax.schedule.exchange import make_exchanges
from zjax.settings import schema
from zjax.settings.axes import axis_sizes
from zjax.settings.batch import resolve_batch
from zjax.sharding import memory
from zjax.sharding.mesh import abstract_mesh
from zjax.sharding.plan import make_plan

NODES = (
    "mesh.replica=2",
    "mesh.data=2",
    "zero.stage=1",
    "model.embed_size=64",
    "num_steps=16",
)
ZERO = ("ZeRO-3", "ZeRO++")
BRIEF = ("adamw, int8", "Streaming DiLoCo")
"""Methods whose programs are compiled in every run of the tests: one of each kind."""


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("1gbps", 125e6),
        ("1Gbps", 125e6),
        ("100mbps", 12.5e6),
        ("2.5kbps", 312.5),
        ("25GBps", 25e9),
        ("0.4tbps", 5e10),
    ],
)
def test_speeds_are_bits_or_bytes(text, speed):
    assert parse_speed(text) == speed


@pytest.mark.parametrize(
    "text", ["fast", "1", "1gb", "1 gbps", "-1gbps", "0gbps", "1gbit", "1bps", "1GBPS"]
)
def test_other_speeds_are_refused(text):
    with config_error(
        f"link={text!r} is not a speed above 0; use bits, such as 100mbps or 1gbps, or "
        "bytes, such as 25GBps"
    ):
        parse_speed(text)


def test_a_link_that_joins_nothing_is_refused(tmp_path):
    config = small_run.make_config(tmp_path)
    with config_error(
        "link='1gbps' joins no nodes with mesh.replica=1; leave it out, or set "
        "mesh.replica to the number of nodes"
    ):
        report_plan(config, num_devices=8, link="1gbps")


def compiled_bytes(run):
    """What one node sends in a mean step, counted in the programs of a run."""
    exchanges = make_exchanges(run.config)
    times = collections.Counter(
        name
        for step in range(1, run.config.num_steps + 1)
        for name in exchanges.at(step).programs
    )
    batch, total = abstract_batch(run.config, run.plan), 0
    for program, number in times.items():
        if program.startswith(("outer_gradients", "merge", "without_errors")):
            continue
        found = list_collectives(run.step.compile(batch, program).as_text())
        total += number * bytes_leaving_node(found, run.mesh, "replica")
    return total / run.config.num_steps


@pytest.mark.parametrize(
    "method",
    [
        name if name in BRIEF else pytest.param(name, marks=pytest.mark.slow)
        for name in methods_of(load_config({}))
        if name not in ZERO
    ],
)
def test_bytes_are_those_of_compiled_programs(method, tmp_path):
    """Fails if a pass, a share of a ring or a step of the schedule is left out."""
    config = methods_of(small_run.make_config(tmp_path, *NODES))[method]
    settings = dataclasses.asdict(config)
    run = small_run.make_trainer(tmp_path, settings, num_devices=4).run
    found = compiled_bytes(run)
    assert sent_per_step(run.plan, run.config) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(("method", "sent"), [("ZeRO-3", 2.625), ("ZeRO++", 0.391)])
def test_bytes_of_shards_are_those_that_were_counted(method, sent):
    """In float16 elements of a parameter, from the lowered programs (docs/zero.md)."""
    config = methods_of(load_config("configs/gpt2_zeropp.py"))[method]
    model, mesh = make_model(config), abstract_mesh(config.mesh, 8)
    plan = make_plan(config, mesh, model, make_optimizer(config, model))
    found = sent_per_step(plan, config) / (2 * memory.num_params(plan))
    assert found == pytest.approx(sent, rel=0.02)


TEXT = """\
a step on 2 nodes joined by links of 1gbps, 125.00 MB/s
computing: 32,768 tokens x 797.8 MFLOP, by 2 devices at
40% of 400.0 TFLOP/s (observe.peak_tflops): 81.7 ms
method                  sent       link       step   speed-up
────────────────────────────────────────────────────────────────────────────
adamw, float32     497.76 MB     3.98 s     4.06 s       0.51   not worth it
adamw, bfloat16    248.88 MB     1.99 s     2.07 s       1.00   baseline
adamw, int8        124.68 MB   997.5 ms     1.08 s       1.92   pays
1-bit Adam          50.66 MB   405.3 ms   487.0 ms       4.26   pays
0/1 Adam            14.82 MB   118.6 ms   200.3 ms      10.35   pays
1-bit LAMB          50.66 MB   405.3 ms   487.0 ms       4.26   pays
DiLoCo              12.44 MB    99.6 ms   181.2 ms      11.44   pays
Streaming DiLoCo     1.56 MB    12.5 ms    94.2 ms      22.01   fastest
ZeRO-3             373.20 MB     2.99 s     3.07 s       0.68   not worth it
ZeRO++                                                          refused
ZeRO++: zero.replicas.secondary_partition=True stores all parameters on each
device of mesh.data=1; use False, or more devices per node
sent: bytes from one node (replica) to others in a step, on average over the run
(a round of DiLoCo takes 40 steps); no communication is hidden behind
computation, and latency is not counted"""


def test_the_prediction_of_gpt2_as_text():
    config = load_config("configs/gpt2_diloco.py", "observe.peak_tflops=400.0")
    text = report_link(config, 2, "1gbps")
    assert text == TEXT
    assert max(map(len, text.splitlines())) <= 80


def test_a_fast_link_makes_no_method_worth_it():
    config = load_config("configs/gpt2_diloco.py", "observe.peak_tflops=400.0")
    text = report_link(config, 2, "1TBps")
    assert text.count("not worth it") == 7
    assert "pays" not in text


def test_a_plain_step_may_be_the_fastest():
    found = [
        Prediction("Adam, bfloat16", 10.0, 1.0, 0.5),
        Prediction("other", 20.0, 1.5, 1.0),
    ]
    assert describe_predictions(found, "Adam, bfloat16").splitlines()[2:] == [
        "Adam, bfloat16   10 B   500.0 ms   1.00 s       1.00   fastest",
        "other            20 B     1.00 s   1.50 s       0.67   not worth it",
    ]


HOST = ("mesh.replica=2", "zero.stage=1", "zero.offload=pinned_host")


def test_the_first_method_that_may_be_used_is_the_baseline():
    """Fails if speed-ups are those over a method that is refused, of 0 seconds."""
    config = load_config({}, *HOST, "optimizer.rule=muon")
    rows = report_link(config, 2, "1gbps").splitlines()[5:15]
    assert rows[0].split()[:2] == ["muon,", "float32"]
    assert rows[0].split()[-2:] == ["1.00", "fastest"]
    assert [row.split()[-1] for row in rows[1:]] == ["refused"] * 9


def test_a_link_without_a_method_is_refused(monkeypatch):
    monkeypatch.setattr(link_speed, "check_config", refuse)
    with config_error(
        "link='1gbps' compares no methods: all are refused; leave it out, or change "
        "what the first is refused for: seed=1 is odd; use 2"
    ):
        report_link(load_config({}, *HOST[:1]), 2, "1gbps")


def refuse(config, num_devices):
    raise ConfigError(Problem("seed", 1, "is odd", "use 2"))


MESH = ("mesh.replica=2", "mesh.data=2", "zero.stage=1", "model.dropout_rate=0.0")
DILOCO = (
    "communication.local_steps.num_steps=4",
    "communication.local_steps.num_fragments=2",
    "communication.local_steps.delay=1",
    "communication.codec=int4",
)
ONE_BIT = ("optimizer.rule=onebit_adam", "optimizer.rule.freeze_step=3")
COUNTERS = 64
"""Bytes of the numbers of steps, at most."""


@pytest.fixture(
    scope="module",
    params=[DILOCO, DILOCO[:2], ONE_BIT],
    ids=["diloco", "exact", "onebit"],
)
def run(request, tmp_path_factory):
    settings, folder = (*MESH, *request.param), tmp_path_factory.mktemp("run")
    return small_run.make_trainer(folder, *settings, num_devices=4).run


def test_bytes_of_a_plan_are_those_on_a_device(run):
    """Fails if the anchor, a momentum, an error or a mean on its way is left out."""
    kept = kept_rows(run.plan, run.config)
    planned = memory.plan_bytes(run.plan, kept).optimizer
    found = state_bytes(run.state, run.mesh.local_devices[0])
    assert 0 <= found - planned < COUNTERS


def test_the_peak_of_a_step_has_the_whole_state_once(run):
    """Fails if what a local step does not read is taken off the batch."""
    batch = abstract_batch(run.config, run.plan)
    parts = run.step.predict_peak(batch).parts
    assert parts["state"] == state_bytes(run.state, run.mesh.local_devices[0])
    assert parts["batch"] == sum(4 * x.size for x in batch.values()) // 4


def test_local_steps_keep_eight_bytes_of_a_parameter_and_more_with_a_delay(tmp_path):
    """Of an anchor and its momentum; with a delay four of a mean; four of errors."""
    sizes = {}
    for name, settings in (("exact", DILOCO[:2]), ("delayed", DILOCO[:3])):
        settings = (*MESH, "zero.min_shard_elements=0", *settings)
        run = small_run.make_trainer(tmp_path, *settings, num_devices=4).run
        kept = kept_rows(run.plan, run.config)
        sizes[name] = memory.tree_bytes(kept) / memory.num_params(run.plan)
    assert sizes["exact"] == pytest.approx(8 / 2, rel=0.02)
    assert sizes["delayed"] == pytest.approx(12 / 2, rel=0.02)


def test_a_device_too_small_for_what_replicas_keep_is_refused(run):
    kept = kept_rows(run.plan, run.config)
    needed = memory.plan_bytes(run.plan, kept).total
    check_device_memory(run.plan, needed, kept)
    with pytest.raises(PlanError) as error:
        check_device_memory(run.plan, needed - 1, kept)
    assert str(error.value).endswith(
        "; raise zero.stage, use more devices, or a smaller model"
    )


def test_a_step_by_formula_counts_it(run):
    config = run.config
    model = make_model(config)
    mesh = weigh(config, config.mesh, model, make_optimizer(config, model))
    planned = memory.plan_bytes(run.plan, kept_rows(run.plan, config))
    gradients = memory.tree_bytes(run.plan.grads)
    assert mesh.state == planned.parameters + planned.optimizer + gradients


def test_a_plan_tells_what_replicas_keep(tmp_path):
    config = small_run.make_config(tmp_path, *MESH, *DILOCO)
    text = report_plan(config, num_devices=4, picture=str(tmp_path / "plan.png"))
    for name in ("anchor", "outer momentum", "errors of the codec", "means on their"):
        assert re.search(rf"^{name} .* kB +.* kB", text, re.MULTILINE), name


@pytest.mark.parametrize("settings", [DILOCO, ONE_BIT], ids=["diloco", "onebit"])
def test_the_closed_form_of_stage_0_has_all_of_it(tmp_path, settings):
    settings = (*MESH, *settings, "zero.stage=0")
    run = small_run.make_trainer(tmp_path, *settings, num_devices=4).run
    kept = kept_rows(run.plan, run.config)
    *_, line = describe_stages([run.plan], [kept]).splitlines()
    total, closed = re.findall(r"[\d.]+ kB", line)[-2:]
    assert total == closed


EXPERT_MESH = schema.Mesh(data=2, expert=4)
DROPPING = schema.TokenChoice(num_experts=8, top_k=2, drop="position", min_capacity=1)


def make_config(moe, mesh=EXPERT_MESH, **model):
    small = {"num_layers": 1, "embed_size": 16, "mlp_size": 32, "vocab_size": 64}
    shape = dataclasses.replace(tensor.GPT, moe=moe, **(small | model))
    return tensor.make_config(shape, mesh)


def sizes_of(config):
    sizes = axis_sizes(config, 8)
    shares = sizes["replica"] * sizes["data"] * sizes["expert"]
    return sizes, resolve_batch(config, shares)


def test_the_plan_tells_each_exchange_and_why(tmp_path):
    """Small capacities are raised to 4, which fills more than the all-gather."""
    moe = dataclasses.replace(DROPPING, num_experts=(4, 16), min_capacity=4)
    config = make_config(moe, num_layers=2)
    text = (
        "a device sends in the layers, for each microbatch\n"
        "axis       bytes/device\n"
        "X\n"
        "expert=4       19.78 kB\n\n"
        "experts   exchange     because\n"
        "X\n"
        "      4   all-to-all   experts of a device take 8 rows of 16 tokens\n"
        "     16   all-gather   experts of a device take 16 rows of 16 tokens"
    )
    found = describe_exchanges(config, *sizes_of(config), make_model(config))
    assert re.sub("─+", "X", found) == text
    picture = str(tmp_path / "plan.png")
    assert found in report_plan(config, num_devices=8, picture=picture)


@pytest.mark.parametrize(
    "moe",
    [DROPPING, schema.TokenChoice(num_experts=8, top_k=2)],
    ids=["all-to-all", "all-gather"],
)
def test_the_program_sends_what_the_plan_says(moe):
    config = make_config(moe)
    sizes, batch = sizes_of(config)
    counted = sent_bytes(config, sizes, batch.microbatch_size, make_model(config))
    _, compiled, _ = tensor.compile_step(config, 8)
    sent = sum(
        each.wire_bytes
        for each in list_collectives(compiled.as_text())
        if EXCHANGED in each.op_name
    )
    assert counted == {"expert": pytest.approx(sent)}


def test_memory_grows_with_the_rows_that_may_arrive():
    """Fails if the plan counts the rows of an even load alone."""
    moe = schema.TokenChoice(num_experts=8, top_k=2)
    alone, split = (
        make_config(moe, mesh, remat="none") for mesh in (schema.Mesh(), EXPERT_MESH)
    )
    less, more = (
        activation_bytes(each, *sizes_of(each), make_model(each))
        for each in (alone, split)
    )
    # Up to 8 rows per token instead of 2, of which 2.5 are saved: inputs and outputs of
    # the activation; tokens that arrive; and, as they are computed, the rows.
    hidden, width = 2 * alone.model.mlp_size, alone.model.embed_size
    values = (2.5 - 2) * hidden + 2 * (8 - 2) * hidden
    values += 3 * 4 * width + 2 * 2 * (8 - 2) * width
    # The saved rows stay while all rows are computed again; and a few indices per row.
    values += 2 * 2.5 * alone.model.mlp_size
    assert more - less == pytest.approx(4 * tensor.LENGTH * values, rel=0.05)
