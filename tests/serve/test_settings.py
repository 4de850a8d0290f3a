"""Settings of a server are refused before anything is loaded."""

import pytest

from tests.support.refusals import config_error
from zjax.serve import Settings
from zjax.serve.server import listen
from zjax.serve.settings import is_loopback

NEEDED = (
    "api_key='' is needed with host='0.0.0.0', which other machines reach; "
    "set ZJAX_API_KEY to a secret of 16 characters or more"
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host": "0.0.0.0"}, NEEDED),
        ({"host": "::"}, NEEDED.replace("0.0.0.0", "::")),
        (
            {"host": "10.0.0.1", "api_key": "short"},
            "api_key='*****' is short for host='10.0.0.1', which other machines reach; "
            "set ZJAX_API_KEY to a secret of 16 characters or more",
        ),
        (
            {"api_key": "schlüssel"},
            "api_key='*********' has characters beyond ASCII; use letters and digits",
        ),
        (
            {"port": 65_536, "max_requests": 0, "drain_seconds": -1.0},
            "port=65536 is not between 0 and 65535; use 8000, or 0 for a free one\n"
            "max_requests=0 is below 1; use 1 or more\n"
            "drain_seconds=-1.0 is not from 0 to below 1e+06; use 30",
        ),
        (
            {"request_seconds": float("nan"), "max_prompt_tokens": -1},
            "max_prompt_tokens=-1 is negative; use 0 for all that the model takes\n"
            "request_seconds=nan is not above 0 and below 1e+06; use 600",
        ),
        ({"served_name": ""}, "served_name='' is no name; write one, such as model"),
    ],
)
def test_what_cannot_be_served_is_refused(given, message):
    with config_error(message):
        Settings(**given)


def test_other_machines_need_a_key_and_this_one_does_not():
    assert Settings(host="0.0.0.0", api_key="k" * 16).host == "0.0.0.0"
    assert Settings(host="::1").host == "::1"
    assert "kkkk" not in repr(Settings(api_key="k" * 16))
    local = "127.0.0.1", "127.9.9.9", "::1", "localhost"
    assert all(map(is_loopback, local))
    for host in ("", "0.0.0.0", "localhost.example", "127.0.0.1.example", "10.0.0.1"):
        assert not is_loopback(host)


def test_an_address_in_use_is_refused():
    with listen(Settings(port=0)) as listener:
        port = listener.getsockname()[1]
        with config_error(
            f"host:port='127.0.0.1:{port}' cannot be listened at (Address already in "
            "use); use another port or host, or 0 for a free port"
        ):
            listen(Settings(port=port))
