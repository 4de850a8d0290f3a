"""What generation takes is told by `zjax plan --generate`."""

import dataclasses

import pytest

from tests.support import small_llama, small_run
from tests.support.allocated import weights_and_caches
from tests.support.command_line import typed
from tests.support.refusals import config_error
from zjax.cli.planning import plan
from zjax.config import load_config
from zjax.estimate.models import add_held, weigh_run
from zjax.generation.generator import Generator
from zjax.generation.loading import settings_of_huggingface
from zjax.generation.sizes import PAGE_SIZE
from zjax.run.generation_plan import plan_generation, report_generation
from zjax.sharding.describe import format_bytes

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def make_config(*settings):
    return small_run.make_config("never/written", "model.dropout_rate=0", *settings)


@pytest.fixture(autouse=True)
def _default_fraction(monkeypatch):
    monkeypatch.delenv(FRACTION, raising=False)


def test_a_plan_says_what_fits_and_how_fast_it_can_be():
    """By hand: weights of 13,952 bytes, and 128 of keys and values for each token."""
    settings = {"num_devices": 1, "device": "L4", "max_rows": 4}
    assert report_generation(make_config(), **settings, device_gb=60e-6) == (
        "generation with 3,488 parameters on 1 device\n"
        "(L4: 60.00 kB for JAX, 300.00 GB/s)\n\n"
        "                                           on a device\n"
        "──────────────────────────────────────────────────────\n"
        "weights                                       13.95 kB\n"
        "weights at the start, with a block twice      22.85 kB\n"
        "keys and values of a token                       128 B\n"
        "row of 16 tokens                               8.19 kB\n"
        "tokens that fit beside the weights                 256\n"
        "pages of 64 tokens                                   4\n"
        "rows that fit, up to max_rows                        4\n\n"
        "a token for each row of 16 tokens, as fast as memory allows\n"
        "rows   weights read   cache read   ms a token   new tokens/s\n"
        "────────────────────────────────────────────────────────────\n"
        "   1       12.99 kB      2.05 kB     5.01e-05     19,946,809\n"
        "   4       13.18 kB      8.19 kB     7.13e-05     56,137,725"
    )


def test_a_row_holds_the_window_of_all_layers_and_a_pass():
    """Fails if a plan counts pages that a generator frees, or says nothing of it."""
    config = make_config("model.max_length=4096", "model.window.size=130")
    text = report_generation(config, num_devices=1, device="L4", device_gb=1e-3)
    lines = [line.split("  ") for line in text.splitlines()]
    cells = {line[0]: line[-1].strip() for line in lines}
    assert cells["row of 4,096 tokens, which holds 704"] == "90.11 kB"
    assert cells["rows that fit, up to max_rows"] == "7"


def test_a_rollout_fits_beside_the_state_of_all_models():
    """Fails if rows of a rollout are counted as if the devices were empty."""
    given = "rl.objective=ppo", "rl.critic=own", "model.vocab_size=257"
    rollout = "rl.rollout.max_new_tokens=4", "rl.rollout.num_prompts=2"
    more = "evaluation.num_batches=0", "evaluation.every_steps=0"
    config = make_config("zero.stage=0", *given, *rollout, *more)
    held = add_held(weigh_run(config, 1)).device
    keys = {"device": "L4", "max_rows": 4, "num_devices": 1}
    plain = dataclasses.replace(config, rl=None)
    weights = plan_generation(plain, 1)[1].resident_bytes
    room = (weights + 4.5 * 8_192) / 1e9  # the sink, and a page for each of three rows
    text = report_generation(config, **keys, device_gb=room + held / 1e9)
    lines = [line.split("  ") for line in text.splitlines()]
    lines = {line[0]: line[-1].strip() for line in lines}
    assert lines["rows that fit, up to max_rows"] == "4"
    assert lines["rows of a rollout that fit, up to max_rows"] == "3"
    told = "state of zjax rl, which a rollout leaves in place"
    assert lines[told] == format_bytes(held)
    assert "rollout" not in report_generation(plain, **keys, device_gb=1.0)


def test_data_shards_have_rows_and_pages_of_their_own():
    """Fails if eight shards hold the rows of one together, or write no more."""
    settings = {"device": "L4", "max_rows": 4, "device_gb": 60e-6}
    first, shards = (
        report_generation(make_config(), num_devices=number, **settings)
        for number in (1, 8)
    )
    for line in ("pages of 64 tokens", "rows that fit"):
        [one], [each] = (
            [x.split() for x in text.splitlines() if x.startswith(line)]
            for text in (first, shards)
        )
        assert one == each
    title = "rows are of each of 8 data shards, tokens/s of all shards\n"
    assert title + "a token for each row of 16 tokens" in shards
    one, all_shards = (
        int(text.split()[-1].replace(",", "")) for text in (first, shards)
    )
    assert all_shards == pytest.approx(8 * one)


def test_a_named_device_has_the_share_that_jax_takes(monkeypatch):
    given = {"num_devices": 1, "device": "H200"}
    assert "(H200: 105.75 GB for JAX, 4.80 TB/s)" in report_generation(
        make_config(), **given
    )
    monkeypatch.setenv(FRACTION, "0.9")
    assert "(H200: 126.90 GB for JAX, 4.80 TB/s)" in report_generation(
        make_config(), **given
    )
    assert "(cpu, with the bandwidth of an NVIDIA H100: memory unknown, " in (
        report_generation(make_config(), num_devices=1)
    )


@pytest.mark.parametrize(
    ("device_gb", "problem"),
    [
        (20e-6, "the weights do not fit at the start, with a block as it is cut"),
        (29e-6, "no row of 16 tokens fits beside the weights"),
    ],
)
def test_a_model_that_does_not_fit_is_told_what_helps(device_gb, problem):
    """Weights of 13.95 kB, and a page of 8.19 kB beside the sink."""
    text = report_generation(make_config(), num_devices=1, device_gb=device_gb)
    assert text.endswith(
        f"\n\n{problem}:\n"
        "use more devices with mesh.tensor or mesh.expert, offload, or shorter rows"
    )


def test_experts_and_links_are_named():
    moe = "model.moe.num_experts=4", "model.moe.top_k=1"
    text = report_generation(make_config(*moe), num_devices=1, max_rows=2)
    assert text.endswith("\nof the experts, 1 and 2 rows read 25% and 44% on average")
    offload = {"kind": "pinned_host", "parameter_memory": "pinned_host"}
    config = load_config(
        make_config("model.embed_size=512"), {"zero": {"offload": offload}}
    )
    text = report_generation(config, num_devices=1, max_rows=2)
    assert "weights that come for each step" in text
    assert "weights at the start" not in text
    assert text.endswith(
        "\nweights come at 40.00 GB/s; disks may be slower (zjax bench --nvme)"
    )


def test_an_open_mesh_and_sizes_out_of_range_are_refused():
    with config_error(
        "mesh='auto' is chosen by what training takes; set the axes, such as "
        "mesh.tensor=2"
    ):
        report_generation(make_config("mesh=auto"), num_devices=8)
    with config_error(
        "max_rows=257 is not between 1 and 256; use 64\n"
        "max_length=17 is not between 0 and model.max_length=16; use 0"
    ):
        report_generation(make_config(), max_rows=257, max_length=17)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--device=H200", "--max_rows=2"),
            "--device='H200' has no effect without --generate; leave it out\n"
            "--max_rows=2 has no effect without --generate; leave it out",
        ),
        (
            ("--generate", "--link=1gbps", "--schedule"),
            "--link='1gbps' has no effect with --generate; leave it out\n"
            "--schedule=True has no effect with --generate; leave it out",
        ),
        (
            ("--generate", "--model=a", "--run=b", "--config.seed=1"),
            "--run='b' has no effect with --model; leave it out\n"
            "--config.seed='1' has no effect with --model; leave it out",
        ),
    ],
)
def test_flags_without_effect_are_refused(words, message):
    with config_error(message):
        plan(typed("plan", *words))


def test_a_checkpoint_of_hugging_face_is_planned_as_it_is_opened(tmp_path, capsys):
    """Fails if the plan has other weights or another cache than the generator."""
    folder = small_llama.write(tmp_path / "llama", max_length=64)
    words = "--num_devices=1", "--device=H100", "--max_length=32"
    plan(typed("plan", "--generate", f"--model={folder}", *words))
    text = capsys.readouterr().out
    assert "a token for each row of 32 tokens" in text
    with Generator(folder, max_rows=1, num_pages=3) as generator:
        weights, caches = weights_and_caches(generator)
    _, footprint = plan_generation(settings_of_huggingface(str(folder)))
    assert footprint.resident_bytes == weights
    assert 3 * PAGE_SIZE * footprint.token_bytes == caches
