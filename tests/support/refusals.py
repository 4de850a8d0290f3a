"""One refused config: overrides, devices and the exact words."""

import pytest

from zjax import config as zconfig
from zjax.errors import ConfigError


def case(overrides, message, *, num_devices=8, id):
    """A row of a table of refusals; overrides are separated by `;`."""
    return pytest.param(overrides.split(";"), num_devices, message, id=id)


def refusal(overrides, num_devices):
    """The whole text of the ConfigError."""
    with pytest.raises(ConfigError) as error:
        config = zconfig.load_config({}, *(o for o in overrides if o))
        zconfig.check_config(config, num_devices)
    return str(error.value)
