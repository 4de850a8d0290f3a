"""The table of what was thought of, and the words that `zjax plan` adds."""

import pytest

from tests.support import small_run
from tests.support.proposals import config_of, machine_of
from zjax.errors import ConfigError
from zjax.estimate.mesh import describe_proposal, propose_mesh
from zjax.run.plan_report import report_plan

ONE = {"zero.stage": 1}
TABLE = """\
data   tensor      state   activations      total
────────────────────────────────────────────────────────────────
   8        1   76.29 GB      18.74 GB   95.03 GB   does not fit
   4        2   44.17 GB       9.37 GB   53.54 GB   taken

A step may take 75.20 GB of the 80.00 GB of a device.
tensor=2: matrices split within a host; smaller sizes take at least 95.03 GB.
data=4: the remaining devices; ZeRO 1 shards over them.
--config.mesh.data=4 --config.mesh.tensor=2"""


def test_table_and_sentences():
    config = config_of("llama 8b", ONE)
    assert describe_proposal(propose_mesh(config, machine_of(8, 80))) == TABLE


def test_experts_are_split_by_hand_alone():
    moe = {"model.moe.num_experts": 8}
    for given, said in (({}, True), ({"mesh.expert": 2}, False)):
        config = config_of("gpt 6.7b", ONE, moe | given)
        reasons = propose_mesh(config, machine_of(8, 1000)).reasons
        expected = (
            "expert=1: auto does not split experts, whose best size depends on the "
            "links between devices; set mesh.expert, and compare."
        )
        assert (expected in reasons) == said


def test_what_cannot_be_has_no_bytes():
    proposal = propose_mesh(config_of("llama 30b", ONE), machine_of(16, 80))
    lines = describe_proposal(proposal).splitlines()
    assert max(map(len, lines)) <= 100
    row, _ = (line.split() for line in lines if "tensor=8" in line)
    assert row == ["1", "2", "8", "tensor=8", "does", "not", "divide"]
    (why,) = (line for line in lines if line.startswith("pipeline=4: "))
    assert why == (
        "pipeline=4: splits of tensors and sequences alone do not fit; smaller sizes "
        "take at least 84.05 GB."
    )


def test_axis_that_only_the_batch_asks_for():
    """Fails if bytes are given as the reason where there are none."""
    config = config_of("gpt 6.7b", ONE, {"global_batch_size": 4})
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
    config = config_of("llama 8b", ONE, {"directory": str(tmp_path)})
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
    with pytest.raises(ConfigError) as error:
        plan(tmp_path, *overrides, **given)
    assert str(error.value) == message
