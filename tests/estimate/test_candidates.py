"""Candidates, what is predicted of them, and the table of reasons."""

import dataclasses

import pytest

from tests.support import small_run
from tests.support.proposals import config_of, machine_of
from tests.support.refusals import config_error
from zjax.config import load_config
from zjax.errors import ConfigError
from zjax.estimate import state
from zjax.estimate.candidates import (
    Candidate,
    Predictor,
    candidates,
    given_candidate,
    with_batch,
)
from zjax.estimate.mesh import describe_proposal, propose_mesh
from zjax.estimate.trial import Machine, weigh
from zjax.models import build
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run import fit, pinned_pool
from zjax.run.plan_report import report_plan
from zjax.sharding import plan as plans

ONE, TWO = Machine(1, 1, 80e9), Machine(2, 2, 80e9)
TINY = ("model.num_layers=2", "model.embed_size=64", "model.num_heads=2")
TINY += ("model.max_length=64", "data.source=synthetic", "global_batch_size=8")


def tiny(*changes):
    return load_config({}, *TINY, *changes)


def predictor(config, machine=ONE):
    return Predictor(with_batch(config, machine), machine, "NVIDIA H100 80GB HBM3")


def test_candidates_keep_the_batch_and_vary_the_rest():
    config = with_batch(tiny("microbatch_size=2"), TWO)
    found = list(candidates(config, TWO))
    assert len(found) == len(set(found))
    assert {x.stage for x in found} == {0, 1, 2, 3}
    assert {x.microbatch_size for x in found if x.tensor == 1} == {1, 2, 4, 8}
    assert {(x.pipeline, x.sequence, x.tensor) for x in found} == {
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
    }
    assert {x.offload for x in found} == {"none", "state", "blocks"}
    for candidate in found[::37]:
        assert candidate.apply(config).global_batch_size == 8


def test_one_device_has_one_mesh_and_axes_that_are_given_stay():
    found = list(candidates(with_batch(tiny("zero.stage=2"), ONE), ONE))
    assert {(x.stage, x.tensor, x.pipeline, x.sequence) for x in found} == {
        (2, 1, 1, 1)
    }
    config = with_batch(tiny("mesh.tensor=2"), TWO)
    assert {x.tensor for x in candidates(config, TWO)} == {2}
    config = with_batch(tiny("mesh.data=2"), TWO)
    assert {x.tensor for x in candidates(config, TWO)} == {1}


def test_a_batch_that_follows_from_the_other_sizes_is_kept():
    config = tiny("global_batch_size=0", "microbatch_size=3", "num_microbatches=2")
    assert with_batch(config, TWO).global_batch_size == 12
    with pytest.raises(ConfigError, match="global_batch_size=0 gives no batch size"):
        with_batch(tiny("global_batch_size=0"), TWO)


def test_settings_of_a_candidate_and_back():
    config = tiny("microbatch_size=4")
    given = given_candidate(config, TWO)
    assert given == Candidate(4, 1, "elementwise")
    assert given.apply(config).zero == config.zero
    for changed in (
        Candidate(2, 3, "full", tensor=2, offload="state"),
        Candidate(8, 0, "none", pipeline=2),
        Candidate(4, 2, "attention", offload="blocks"),
    ):
        assert given_candidate(changed.apply(config), TWO) == changed
    assert given_candidate(tiny("mesh=auto"), TWO) is None
    assert given_candidate(tiny("zero.offload=auto"), TWO) is None
    assert given_candidate(tiny("global_batch_size=9"), TWO) is None


def test_elastic_batches_leave_the_microbatch_alone():
    elastic = ("elasticity.microbatch_sizes=(2,4)", "elasticity.max_batch_size=16")
    config = with_batch(tiny(*elastic, "global_batch_size=0"), TWO)
    assert {x.microbatch_size for x in candidates(config, TWO)} == {0}
    assert given_candidate(config, TWO).microbatch_size == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_are_those_of_the_budget(stage):
    found = predictor(tiny(), TWO)
    candidate = Candidate(2, stage, "full")
    config = candidate.apply(with_batch(tiny(), TWO))
    model = make_model(config)
    mesh = dataclasses.replace(config.mesh, data=2)
    theirs = weigh(config, mesh, model, make_optimizer(config, model))
    assert found.num_bytes(candidate) == theirs.total
    none = dataclasses.replace(candidate, remat="none")
    assert found.num_bytes(none) > theirs.total


def test_bytes_of_microbatches_share_the_state_that_is_counted_once():
    found = predictor(tiny(), TWO)
    less, more = (found.num_bytes(Candidate(n, 2, "none")) for n in (1, 2))
    assert more > less
    offloaded = found.num_bytes(Candidate(1, 2, "none", offload="state"))
    assert offloaded < less


LARGE = ("model.num_layers=48", "model.embed_size=1600", "model.num_heads=25")
LARGE += ("data.source=synthetic", "global_batch_size=512")


def seconds(candidate, machine=ONE, *changes):
    return predictor(load_config({}, *LARGE, *changes), machine).seconds(candidate)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (Candidate(16, 1, "none"), Candidate(16, 1, "elementwise")),
        (Candidate(16, 1, "attention"), Candidate(16, 1, "full")),
        (Candidate(16, 1, "none"), Candidate(2, 1, "none")),
        (Candidate(16, 1, "none"), Candidate(16, 1, "none", offload="state")),
        (
            Candidate(16, 1, "none", offload="state"),
            Candidate(16, 1, "none", offload="blocks"),
        ),
    ],
)
def test_seconds_rank_what_costs_more_behind(less, more):
    assert seconds(less) < seconds(more)


@pytest.mark.parametrize(
    "more",
    [
        Candidate(8, 3, "none"),
        Candidate(8, 1, "none", tensor=5),
        Candidate(8, 1, "none", sequence=5),
        Candidate(8, 1, "none", pipeline=5),
    ],
)
def test_seconds_of_splits_that_a_run_does_without(more):
    machine = Machine(5, 5, 80e9)
    batch = "global_batch_size=320"
    assert seconds(Candidate(8, 1, "none"), machine, batch) < seconds(
        more, machine, batch
    )


def test_a_gpt_of_1p5b_is_led_to_what_was_fastest_by_hand():
    """BENCHMARKS.md: 16 sequences of 1,024 tokens, elementwise."""
    found = predictor(load_config({}, *LARGE), Machine(1, 1, 79e9))
    ranked = sorted(
        candidates(with_batch(load_config({}, *LARGE), ONE), ONE), key=found.seconds
    )
    fitting = [x for x in ranked if found.num_bytes(x) <= found.usable_bytes]
    assert Candidate(16, 1, "elementwise") in fitting[:2]


def test_obstacles_are_named():
    found = predictor(tiny(), Machine(4, 4, 80e9))
    assert found.obstacle(Candidate(1, 1, "none", tensor=4)) == (
        "tensor=4 does not divide model.num_heads=2"
    )
    assert not found.obstacle(Candidate(1, 1, "none", tensor=2))


def test_frozen_weights_have_no_traffic_of_gradients_and_less_work():
    """Fails if adapters are ranked as if all weights had gradients and moments."""
    plain, adapted = ((), ("lora.rank=8",))
    whole, part = (
        [
            seconds(Candidate(8, stage, "none"), Machine(8, 8, 80e9), *changes)
            for stage in (1, 3)
        ]
        for changes in (plain, adapted)
    )
    assert part[0] < 0.8 * whole[0]
    assert part[0] < part[1] < whole[1]
    config = load_config({}, *LARGE, *adapted)
    assert predictor(config).num_bytes(Candidate(1, 0, "full")) < 2.6 * 1.56e9 * 2


SINGLE = {"zero.stage": 1}
TABLE = """\
data   tensor      state   activations      total
────────────────────────────────────────────────────────────────
   8        1   76.29 GB      18.83 GB   95.12 GB   does not fit
   4        2   44.17 GB       9.41 GB   53.58 GB   taken

A step may take 75.20 GB of the 80.00 GB of a device.
tensor=2: matrices split within a host; smaller sizes take at least 95.12 GB.
data=4: the remaining devices; ZeRO 1 shards over them.
--config.mesh.data=4 --config.mesh.tensor=2"""


def test_table_and_sentences():
    config = config_of("llama 8b", SINGLE)
    assert describe_proposal(propose_mesh(config, machine_of(8, 80))) == TABLE


def test_experts_are_split_by_hand_alone():
    moe = {"model.moe.num_experts": 8}
    for given, said in (({}, True), ({"mesh.expert": 2}, False)):
        config = config_of("gpt 6.7b", SINGLE, moe | given)
        reasons = propose_mesh(config, machine_of(8, 1000)).reasons
        expected = (
            "expert=1: auto does not split experts, whose best size depends on the "
            "links between devices; set mesh.expert, and compare."
        )
        assert (expected in reasons) == said


def test_what_cannot_be_has_no_bytes():
    proposal = propose_mesh(config_of("llama 30b", SINGLE), machine_of(16, 80))
    lines = describe_proposal(proposal).splitlines()
    assert max(map(len, lines)) <= 100
    row, _ = (line.split() for line in lines if "tensor=8" in line)
    assert row == ["1", "2", "8", "tensor=8", "does", "not", "divide"]
    (why,) = (line for line in lines if line.startswith("pipeline=4: "))
    assert why == (
        "pipeline=4: splits of tensors and sequences alone do not fit; smaller sizes "
        "take at least 84.06 GB."
    )


def test_axis_that_only_the_batch_asks_for():
    """Fails if bytes are given as the reason where there are none."""
    config = config_of("gpt 6.7b", SINGLE, {"global_batch_size": 4})
    assert propose_mesh(config, machine_of(4, 141)).reasons[1:] == (
        "tensor=2: matrices split within a host; global_batch_size=4 does not divide "
        "by 4 batch shards x microbatch_size=2.",
        "data=2: the remaining devices; ZeRO 1 shards over them.",
    )


def test_stages_that_communicate_in_each_tick_are_said():
    config = config_of("llama 30b", {"zero.stage": 2, "mesh.pipeline": 2})
    said = propose_mesh(config, machine_of(16, 141)).reasons
    assert said[-1] == (
        "zero.stage=2 communicates in each tick of a pipeline; zero.stage=1 once per "
        "step, where it fits."
    )


def plan(tmp_path, *overrides, **given):
    config = small_run.make_config(tmp_path, *overrides)
    return report_plan(config, picture=str(tmp_path / "plan.png"), **given)


def test_plan_ends_with_what_to_type(tmp_path):
    """Fails if the plan is that of another mesh than the one proposed."""
    text = plan(tmp_path, "mesh=auto", num_devices=16, device_gb=80)
    assert text.startswith("plan: ZeRO 2 on mesh (data=16)")
    assert text.splitlines()[-1] == "--config.mesh.data=16"
    assert max(map(len, text.splitlines())) <= 100


def test_plan_takes_the_machine_as_it_is_described(tmp_path):
    given = {"num_devices": 16, "devices_per_host": 2}
    config = config_of("llama 8b", SINGLE, {"directory": str(tmp_path)})
    text = report_plan(config, **given, device_gb=110)
    assert text.splitlines()[-1] == "--config.mesh.data=16"
    text = report_plan(config, **given, device_gb=80)
    assert text.splitlines()[-1] == "--config.mesh.data=8 --config.mesh.tensor=2"


@pytest.mark.parametrize(
    ("overrides", "given", "message"),
    [
        (
            ["mesh=auto"],
            {"num_devices": 16},
            "device_gb=0 is needed by mesh='auto' for devices that are not here; give "
            "their memory, such as --device_gb=80",
        ),
        (
            [],
            {"device_gb": 80, "devices_per_host": 8},
            "device_gb=80 is used only with mesh='auto'; leave it out\n"
            "devices_per_host=8 is used only with mesh='auto'; leave it out",
        ),
    ],
)
def test_machine_that_says_nothing_is_refused(tmp_path, overrides, given, message):
    with config_error(message):
        plan(tmp_path, *overrides, **given)


@pytest.fixture
def built(monkeypatch):
    """What is built from here on, by name."""
    found = []

    def record(module, function, name):
        original = getattr(module, function)

        def recorded(*args, **kwargs):
            found.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, function, recorded)

    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    build._build.cache_clear()
    pinned_pool._planned.cache_clear()
    record(build, "decoder_stack", "model")
    for module in (fit, pinned_pool, state):
        record(module, "make_plan", module.__name__.rpartition(".")[2])
    record(plans, "make_plan", "report")
    return found


def test_a_run_builds_its_model_and_its_plan_once(built, tmp_path):
    """Fails if the command, the proposal of a mesh and the run each build a model. The
    limit of pinned memory takes a plan of its own: JAX reads it before there are
    devices, and so before there is their mesh."""
    settings = ("mesh=auto", "zero.offload=pinned_host")
    # As `zjax train` does.
    pinned_pool.limit_pinned_pool(small_run.make_config(tmp_path, *settings))
    small_run.make_trainer(tmp_path, *settings).close()
    assert built.count("model") == 1
    assert (built.count("pinned_pool"), built.count("fit")) == (1, 1)


@pytest.mark.parametrize("memory", ["none", "auto"])
def test_a_report_plans_each_stage_once(built, memory, tmp_path):
    """Fails if the plan of the run is made beside that of its ZeRO stage."""
    config = small_run.make_config(tmp_path, f"zero.offload={memory}")
    report_plan(config, picture=str(tmp_path / "plan.png"))
    assert built.count("model") == 1
    assert (built.count("report"), built.count("fit")) == (4, 0)
