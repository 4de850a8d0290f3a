"""Refusals: the exact words of an error, and tables of refused configs."""

import contextlib
import functools

import pytest

from zjax import config as zconfig
from zjax import errors


@contextlib.contextmanager
def refused(error, text):
    """Holds the enclosed work to one error and its exact words."""
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value) == text


checkpoint_error = functools.partial(refused, errors.CheckpointError)
config_error = functools.partial(refused, errors.ConfigError)
data_error = functools.partial(refused, errors.DataError)
model_error = functools.partial(refused, errors.ModelError)
plan_error = functools.partial(refused, errors.PlanError)
process_error = functools.partial(refused, errors.ProcessError)
value_error = functools.partial(refused, ValueError)


def each_refusal(messages):
    """Parametrises a test with overrides and their message, by overrides with `;`."""
    rows = [(given.split(";"), message) for given, message in messages.items()]
    return pytest.mark.parametrize(("overrides", "message"), rows, ids=list(messages))


def refusal(overrides, num_devices=8):
    """The whole text of the ConfigError."""
    with pytest.raises(errors.ConfigError) as error:
        config = zconfig.load_config({}, *(o for o in overrides if o))
        zconfig.check_config(config, num_devices)
    return str(error.value)
