"""Kept tokens and layers by step, and what is refused of them in exact words."""

import pytest

from tests.support.refusals import case, refusal
from zjax.parallel.slots import assign_slots, whole_slots
from zjax.run.extended import dropping_at
from zjax.schedule.dropping import DroppingSchedule, make_dropping, num_middle_layers
from zjax.schedule.pacing import grow, hold
from zjax.settings import schema

LTD, PLD = "random_ltd.form=layerwise", "layer_drop.theta=0.5"
CASES = [
    case(
        f"{LTD};random_ltd.pacing.start=1024",
        "random_ltd.pacing.start=1024 is not below data.length=1024; use a smaller one",
        id="bounds-reversed",
    ),
    case(
        f"{LTD};random_ltd.pacing.end=512",
        "random_ltd.pacing.end=512 is below data.length=1024: no step would be whole; "
        "end with 1024, or set data.length=512",
        id="ends-below",
    ),
    case(
        f"{LTD};random_ltd.pacing.num_steps=1001",
        "random_ltd.pacing.num_steps=1001 is beyond num_steps=1000; use at most 1000",
        id="beyond-the-run",
    ),
    case(
        "random_ltd.pacing.start=256",
        "random_ltd.pacing.start=256 has no effect with random_ltd.form='none'; leave "
        "it at 128, or set random_ltd.form to 'layerwise' or 'span'",
        id="without-effect",
    ),
    case(
        f"{LTD};mesh.sequence=2;random_ltd.pacing.multiple=1",
        "random_ltd.pacing.multiple=1 is not a multiple of mesh.sequence=2; use 2",
        id="sequence",
    ),
    case(
        f"{LTD};mesh.pipeline=2;num_microbatches=2;pipeline.schedule=interleaved;"
        "pipeline.num_chunks=0",
        "pipeline.num_chunks=0 is out of range; use 2 or more",
        id="no-chunks",
    ),
    case(
        f"{LTD};mesh.pipeline=8;num_microbatches=2",
        "random_ltd.form='layerwise' has no layer to drop tokens of: as the stages of "
        "mesh.pipeline=8 run one program, all layers run whole beside the first or the "
        "last one; use 'none', or fewer stages or chunks",
        id="short-stages",
    ),
    case(
        f"{LTD};mesh.pipeline=2;num_microbatches=2;model.moe.num_experts=8;"
        "model.moe.first_dense=1",
        "random_ltd.form='layerwise' does not count the tokens of 2 kinds of blocks on "
        "the stages of mesh.pipeline=2; use 'none', or mesh.pipeline=1",
        id="stages-of-two-kinds",
    ),
    case(
        f"{PLD};mesh.pipeline=2;mesh.tensor=2;zero.stage=3;num_microbatches=2",
        "layer_drop.theta=0.5 has stages of mesh.pipeline=2 skip different layers, and "
        "layers of mesh.tensor=2 communicate in all stages at once; leave mesh.tensor "
        "out, or use mesh.pipeline=1 or 1.0\n"
        "layer_drop.theta=0.5 has stages of mesh.pipeline=2 skip different layers, and "
        "layers of zero.stage=3 communicate in all stages at once; leave zero.stage "
        "out, or use mesh.pipeline=1 or 1.0",
        id="stages-that-communicate",
    ),
    case(
        f"{PLD};mesh.pipeline=2;num_microbatches=2;pipeline.schedule=zb_h1;"
        "pipeline.recompute=False;model.remat=none",
        "layer_drop.theta=0.5 skips a layer as a whole, and pipeline.schedule='zb_h1' "
        "takes its backward pass apart; use '1f1b' there, or 1.0",
        id="weights-apart",
    ),
    case(
        f"{LTD};{PLD};model.mlp_tiles=2;zero.optimizer_memory=pinned_host",
        "random_ltd.form='layerwise' is not built for tiles of model.mlp_tiles=2 with "
        "zero.optimizer_memory='pinned_host'; use 'none', or mlp_tiles=1\n"
        "layer_drop.theta=0.5 is not built for tiles of model.mlp_tiles=2 with "
        "zero.optimizer_memory='pinned_host'; use 1.0, or mlp_tiles=1",
        id="tiles",
    ),
    case(
        f"{PLD};model.remat=full;model.activation_memory=pinned_host",
        "layer_drop.theta=0.5 is not built for model.activation_memory='pinned_host'; "
        "use 'device', or 1.0",
        id="activations",
    ),
    case(
        f"{LTD};deterministic=True",
        "random_ltd.form='layerwise' repeats a cuDNN kernel for other numbers of "
        "tokens, which cannot run with deterministic=True; use 'none', or "
        "model.attention='xla'",
        id="deterministic",
    ),
    case(
        f"{LTD};model.num_layers=2",
        "random_ltd.form='layerwise' has no layer between the first and the last of 2; "
        "use 'none', or more layers",
        id="too-few-layers",
    ),
    case(
        f"{LTD};model.layers_per_scan=4",
        "model.layers_per_scan=4 does not divide the 10 layers that "
        "random_ltd.form='layerwise' drops tokens of; use 1 or 2",
        id="loop",
    ),
    case(
        f"{PLD};model.kind=encoder",
        "layer_drop.theta=0.5 scales what a layer adds, and model.kind='encoder' "
        "normalises the sum; use 1.0, or a decoder",
        id="encoder",
    ),
    case(
        "layer_drop.gamma=0.1",
        "layer_drop.gamma=0.1 has no effect with layer_drop.theta=1.0; leave it at 0.0",
        id="gamma-without-effect",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), CASES)
def test_what_does_not_fit_is_refused(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message


def test_kept_tokens_have_the_golden_values():
    """Linear from 128 to 2048 in multiples of 16, counted from 0."""
    kept = grow(128, 2048, 200_000, multiple=16)
    schedule = DroppingSchedule(kept, hold(2048))
    golden = {
        0: 128,
        1_666: 128,
        1_667: 144,
        100_000: 1088,
        199_999: 2032,
        200_000: 2048,
    }
    assert {t: schedule.num_kept(t + 1) for t in golden} == golden
    config = schema.Config(random_ltd=schema.RandomLTD(form="layerwise"))
    batches = {t: dropping_at(config, schedule, t + 1, 2048) for t in golden}
    del golden[200_000]
    assert {t: batches[t].num_kept for t in golden} == golden
    assert batches[200_000].num_kept == 0  # all of them
    tokens = schedule.sum_until(286_102) / (286_102 * 2048)
    assert round((2 + 22 * tokens) / 24, 3) == 0.697


def test_theta_has_the_golden_values():
    schedule = DroppingSchedule(hold(8), hold(8), theta=0.5, gamma=0.001)
    golden = {0: 1.0, 1_000: 0.683940, 5_000: 0.503369, 10_000: 0.500023}
    assert {t: round(schedule.theta_at(t + 1), 6) for t in golden} == golden
    limit = schema.Config(num_steps=2_000, layer_drop=schema.LayerDrop(theta=0.5))
    assert make_dropping(limit).gamma == 0.05


def test_sums_are_those_of_the_steps_when_lengths_grow_too():
    schedule = DroppingSchedule(
        grow(4, 32, 9, multiple=4), grow(8, 32, 6, multiple=8), theta=1.0
    )
    kept = [min(4 + 28 * t // 9 // 4 * 4, 32) for t in range(12)]
    lengths = [min(8 + 24 * n // 6 // 8 * 8, 32) for n in range(1, 13)]
    wanted = [*map(min, kept, lengths)]
    assert [schedule.num_kept(n) for n in range(1, 13)] == wanted
    assert [schedule.sum_until(n) for n in range(13)] == [
        sum(wanted[:n]) for n in range(13)
    ]
    pairs = [*zip(wanted, lengths, strict=True)]
    changes = [1, *(n + 1 for n in range(1, 12) if pairs[n] != pairs[n - 1])]
    assert schedule.firsts() == changes


def test_first_and_last_block_are_whole():
    dense = schema.Model(num_layers=6)
    mixed = schema.Model(num_layers=6, moe=schema.MoE(num_experts=4, every=2))
    assert num_middle_layers(schema.Config(model=dense), 1) == 4
    assert num_middle_layers(schema.Config(model=mixed), 1) == 2


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks"),
    [(6, 2, 1), (7, 2, 1), (5, 2, 1), (12, 2, 2), (8, 4, 1), (9, 4, 1), (12, 1, 1)],
)
def test_layers_that_count_are_those_that_stages_cut(num_layers, stages, chunks):
    """Fails if the counted layers are not those whose slots run on some tokens."""
    (slots,) = assign_slots([num_layers], stages * chunks, [1])
    places = [divmod(block, slots.size)[1] for block in range(num_layers)]
    wanted = sum((0, place) not in whole_slots([slots]) for place in places)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    config = schema.Config(
        model=schema.Model(num_layers=num_layers),
        mesh=schema.Mesh(pipeline=stages),
        pipeline=schema.Pipeline(schedule=schedule, num_chunks=chunks or 2),
    )
    assert num_middle_layers(config, 8) == wanted
