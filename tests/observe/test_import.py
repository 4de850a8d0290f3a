"""Importing the package is cheap: what may not be wanted has not happened yet."""

import subprocess
import sys

PROGRAM = """
import sys
import jax
import zjax.observe
expensive = "wandb", "matplotlib.pyplot", "jax.experimental.pallas.mosaic_gpu"
print(*(name for name in expensive if name in sys.modules))
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend runs
print(jax.device_count())
"""


def test_importing_starts_no_backend_and_takes_no_optional_package():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n3\n"
