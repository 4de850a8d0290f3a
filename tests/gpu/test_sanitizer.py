"""The block-sparse kernels under NVIDIA's compute-sanitizer."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.gpu import NEEDS_HOPPER

pytestmark = NEEDS_HOPPER
PATHS = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
ALLOCATIONS_APART = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
}
"""Without these all arrays lie in one allocation, and no access is outside of it."""
REFUSED = re.compile(
    r"not supported|[Ii]nsufficient.*(permission|privilege)|terminated before first"
)
FOUND, KERNELS = 9, ("forward", "backward_queries", "backward_keys")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_are_clean(tool):
    """Fails on an access outside of an array, or on a race in shared memory."""
    program = shutil.which("compute-sanitizer", path=PATHS)
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    options = ("--tool", tool, "--error-exitcode", str(FOUND))
    api = ("--report-api-errors", "no") if tool == "memcheck" else ()
    done = subprocess.run(
        [program, *options, *api, sys.executable, "-m", "tests.support.kernel_calls"],
        env=os.environ | ALLOCATIONS_APART,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = done.stdout + done.stderr
    ran = re.findall(r"^ran (\w+)$", done.stdout, re.MULTILINE)
    refused = REFUSED.search(output)
    if refused and not ran:
        pytest.skip(f"compute-sanitizer refuses this device: {refused.group()}")
    assert done.returncode == 0, output[-4000:]
    assert ran == [*KERNELS]
    assert re.search(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", output)
