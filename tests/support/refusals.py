"""Refusals: the exact words of an error, and tables of refused configs."""

import contextlib
import functools
import pathlib

import pytest

from zjax import config as zconfig
from zjax import errors

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "refusals"


def listed(pattern):
    """What is refused and the words, of each entry in files of `tests/golden/refusals`.

    An entry is a line, and the indented lines of the message below it.
    """
    entries = {}
    for path in sorted(GOLDEN.glob(pattern)):
        for entry in path.read_text().split("\n\n"):
            head, *message = entry.splitlines()
            if not head.startswith("#"):
                entries[head] = "\n".join(line.strip() for line in message)
    return entries


@contextlib.contextmanager
def refused(error, text):
    """Holds the enclosed work to one error and its exact words."""
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value) == text


bench_error = functools.partial(refused, errors.BenchError)
checkpoint_error = functools.partial(refused, errors.CheckpointError)
config_error = functools.partial(refused, errors.ConfigError)
data_error = functools.partial(refused, errors.DataError)
model_error = functools.partial(refused, errors.ModelError)
non_finite_error = functools.partial(refused, errors.NonFiniteError)
output_error = functools.partial(refused, errors.OutputError)
package_error = functools.partial(refused, errors.PackageError)
plan_error = functools.partial(refused, errors.PlanError)
process_error = functools.partial(refused, errors.ProcessError)
state_error = functools.partial(refused, errors.StateError)
storage_error = functools.partial(refused, errors.StorageError)
value_error = functools.partial(refused, ValueError)


def refusal(overrides, num_devices=8):
    """The whole text of the ConfigError."""
    with pytest.raises(errors.ConfigError) as error:
        config = zconfig.load_config({}, *(o for o in overrides if o))
        zconfig.check_config(config, num_devices)
    return str(error.value)
