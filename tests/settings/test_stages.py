"""Every rule about the stages of a pipeline, with the exact words."""

import pytest

from tests.support.refusals import case, refusal
from zjax import config as zconfig

RULES = [
    case(
        "pipeline.schedule=gpipe;pipeline.recompute=False",
        "pipeline.schedule='gpipe' has no effect with mesh.pipeline=1; leave it at "
        "'1f1b', or set mesh.pipeline above 1\n"
        "pipeline.recompute=False has no effect with mesh.pipeline=1; leave it at "
        "True, or set mesh.pipeline above 1",
        id="no-pipeline",
    ),
    case(
        "mesh.pipeline=-1;mesh.data=8;pipeline.schedule=gpipe",
        "pipeline.schedule='gpipe' has no effect with mesh.pipeline=1; leave it at "
        "'1f1b', or set mesh.pipeline above 1",
        id="no-pipeline-as-the-rest",
    ),
    case(
        "mesh.pipeline=2;pipeline.num_chunks=3",
        "pipeline.num_chunks=3 has no effect with pipeline.schedule='1f1b'; leave it "
        "at 2, or set pipeline.schedule to 'interleaved'",
        id="chunks-of-another-schedule",
    ),
    case(
        "mesh.pipeline=2;pipeline.schedule=interleaved;pipeline.num_chunks=1"
        ";num_microbatches=2",
        "pipeline.num_chunks=1 is out of range; use 2 or more",
        id="one-chunk",
    ),
    case(
        "mesh.pipeline=8;model.num_layers=4",
        "mesh.pipeline=8 makes more stages than model.num_layers=4; use at most 4",
        id="more-stages-than-layers",
    ),
    case(
        "mesh.pipeline=-1;mesh.data=1;model.num_layers=4",
        "mesh.pipeline=-1 comes out as 8 and makes more stages than "
        "model.num_layers=4; use at most 4",
        id="more-stages-than-layers-as-the-rest",
    ),
    case(
        "mesh.pipeline=2;pipeline.schedule=interleaved;pipeline.num_chunks=4"
        ";num_microbatches=2",
        "pipeline.num_chunks=4 does not split model.num_layers=12 equally over 2 "
        "stages; use 2",
        id="chunks-of-unequal-size",
    ),
    case(
        "mesh.pipeline=4;pipeline.schedule=interleaved;num_microbatches=4"
        ";model.num_layers=6",
        "pipeline.num_chunks=2 does not split model.num_layers=6 equally over 4 "
        "stages; use pipeline.schedule='1f1b', or another number of layers",
        id="no-chunks-fit",
    ),
    case(
        "mesh.pipeline=4;pipeline.schedule=interleaved;pipeline.num_chunks=3"
        ";num_microbatches=2",
        "num_microbatches=2 does not divide into groups of 4, as "
        "pipeline.schedule='interleaved' takes them; use a multiple of 4",
        id="microbatches-of-no-group",
    ),
    case(
        "mesh.pipeline=2;zero.optimizer_memory=pinned_host;model.remat=full",
        "zero.optimizer_memory='pinned_host' moves blocks one by one, and "
        "mesh.pipeline=2 runs whole stages; use 'device', or mesh.pipeline=1",
        id="offload",
    ),
    case(
        "mesh.pipeline=2;pipeline.schedule=zb_h1;model.remat=none",
        "pipeline.schedule='zb_h1' would recompute each stage for the weight "
        "gradients; set pipeline.recompute to False, or use '1f1b'",
        id="weights-apart-and-recomputed",
    ),
    case(
        "mesh.pipeline=2;pipeline.schedule=zb_h1;pipeline.recompute=False"
        ";model.remat=full",
        "model.remat='full' hides the weight gradients that pipeline.schedule='zb_h1' "
        "separates; use 'none', or "
        "pipeline.schedule='1f1b'",
        id="weights-apart-and-remat",
    ),
    case(
        "mesh.pipeline=2;model.layers_per_scan=2",
        "model.layers_per_scan=2 has no effect in a pipeline, whose stages unroll "
        "their layers; use 0",
        id="loop-over-layers",
    ),
    case(
        "mesh.pipeline=2;model.layers_per_scan=5",
        "model.layers_per_scan=5 has no effect in a pipeline, whose stages unroll "
        "their layers; use 0",
        id="loop-that-does-not-divide-layers",
    ),
    case(
        "mesh.pipeline=2;model.layers_per_scan=2;deterministic=True",
        "model.layers_per_scan=2 has no effect in a pipeline, whose stages unroll "
        "their layers; use 0\n"
        "deterministic=True cannot repeat a cuDNN kernel in each stage; use False, or "
        "model.attention='xla'",
        id="loop-and-deterministic",
    ),
    case(
        "mesh.pipeline=2;model.remat=full;model.activation_memory=pinned_host",
        "model.activation_memory='pinned_host' has no effect in a pipeline, whose "
        "stages store activations themselves; leave it at 'device'",
        id="activations-elsewhere",
    ),
    case(
        "mesh.pipeline=2;deterministic=True",
        "deterministic=True cannot repeat a cuDNN kernel in each stage; use False, or "
        "model.attention='xla'",
        id="deterministic",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), RULES)
def test_rule(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.pipeline=4"],
        ["mesh.pipeline=5", "model.num_layers=12", "mesh.data=1"],
        ["mesh.pipeline=2", "pipeline.schedule=interleaved", "num_microbatches=4"],
        [
            "mesh.pipeline=2",
            "pipeline.schedule=zb_h1",
            "pipeline.recompute=False",
            "model.remat=none",
        ],
    ],
)
def test_what_can_be_cut_is_not_refused(overrides):
    num_devices = 5 if overrides[0].endswith("5") else 8
    zconfig.check_config(zconfig.load_config({}, *overrides), num_devices)
