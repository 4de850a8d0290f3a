"""Flags of `zjax serve`, and runs that are served."""

import pytest

from tests.support import small_run
from tests.support.command_line import typed
from tests.support.refusals import config_error, package_error
from tests.support.serving import served
from zjax.cli import serving
from zjax.serve import Settings
from zjax.serve.server import listen


@pytest.fixture(autouse=True)
def without_key(monkeypatch):
    monkeypatch.delenv("ZJAX_API_KEY", raising=False)


def test_flags_are_settings_of_the_server(monkeypatch):
    given = typed(
        "serve",
        *("--model=some/Qwen3-8B/", "--host=::1", "--port=1", "--api_key=mine"),
        *("--max_body_bytes=2", "--max_prompt_tokens=3", "--max_request_rows=4"),
        *("--max_requests=5", "--request_seconds=6", "--max_unread_bytes=7"),
        "--drain_seconds=8",
    )
    assert serving.read_settings(given) == Settings(
        host="::1",
        port=1,
        api_key="mine",
        served_name="Qwen3-8B",
        max_body_bytes=2,
        max_prompt_tokens=3,
        max_request_rows=4,
        max_requests=5,
        request_seconds=6.0,
        max_unread_bytes=7,
        drain_seconds=8.0,
    )
    plain = typed("serve", "--run=runs/quickstart")
    assert serving.read_settings(plain) == Settings(served_name="quickstart")
    named = typed("serve", "--run=runs/quickstart", "--served_name=mine")
    monkeypatch.setenv("ZJAX_API_KEY", "theirs")
    wanted = Settings(served_name="mine", api_key="theirs")
    assert serving.read_settings(named) == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (),
            "--run='' names nothing to serve; give --run=DIR of a run, or --model=DIR "
            "of a Hugging Face checkpoint",
        ),
        (
            ("--model=a", "--run=b", "--step=3"),
            "--run='b' has no effect with --model; leave it out\n"
            "--step='3' has no effect with --model; leave it out",
        ),
        (
            ("--model=a", "--host=0.0.0.0"),
            "api_key='' is needed with host='0.0.0.0', which other machines reach; "
            "set ZJAX_API_KEY to a secret of 16 characters or more",
        ),
    ],
    ids=["nothing", "both", "no-key"],
)
def test_what_cannot_be_served_is_refused(words, message):
    with config_error(message):
        serving.serve_texts(typed("serve", *words))


def test_a_missing_package_is_told_before_weights_are_read(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with package_error(
        "package='starlette' is not installed, and servers of texts need it; "
        "pip install starlette"
    ):
        serving.serve_texts(typed("serve", "--model=nowhere"))


def test_an_address_in_use_is_told_before_weights_are_read():
    with listen(Settings(port=0)) as listener:
        port = listener.getsockname()[1]
        with config_error(
            f"host:port='127.0.0.1:{port}' cannot be listened at (Address already in "
            "use); use another port or host, or 0 for a free port"
        ):
            serving.serve_texts(typed("serve", "--model=nowhere", f"--port={port}"))


def test_a_run_is_served(tmp_path):
    """Fails if other weights than those of the run write the texts."""
    trainer = small_run.fit(tmp_path / "small", "checkpoint.every_steps=4")
    wanted = trainer.generate("5 6 7", temperature=0.0, max_new_tokens=4)
    with served(f"--run={tmp_path / 'small'}", "--max_rows=1") as server:
        asked = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
        status, reply = server.ask(prompt="5 6 7", model="small", **asked)
    assert status == 200
    assert "5 6 7" + reply["choices"][0]["text"] == wanted
