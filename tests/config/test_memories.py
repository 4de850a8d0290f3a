"""Where things may rest, with the exact words of each refusal."""

import pytest

from tests.support.refusals import case, refusal

CASES = [
    case(
        "zero.stage=2;zero.optimizer_memory=nvme;model.remat=full",
        "zero.nvme_paths=() names no directory for arrays stored on 'nvme'; name a "
        "directory "
        "on each disk, such as ('/mnt/nvme0',)",
        id="no-disk",
    ),
    case(
        "zero.nvme_paths=('/nvme',)",
        "zero.nvme_paths=('/nvme',) has no effect, as nothing is stored on 'nvme'; "
        "leave "
        "it at (), or set zero.optimizer_memory to 'nvme' or 'auto'",
        id="nothing-on-the-disk",
    ),
    case(
        "zero.memory=pinned_host;zero.optimizer_memory=device",
        "zero.memory='pinned_host' has no effect with zero.optimizer_memory='device'; "
        "leave it at 'device', or set zero.optimizer_memory to 'pinned_host' or 'nvme' "
        "or 'auto'",
        id="nothing-leaves",
    ),
    case(
        "model.activation_memory=nvme;zero.nvme_paths=('/nvme',)",
        "model.activation_memory='nvme' needs a program per block, and "
        "zero.optimizer_memory='device' runs one in all; use 'pinned_host', or another "
        "zero.optimizer_memory",
        id="one-program",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), CASES)
def test_what_cannot_rest_there_is_refused(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message
