"""Command that serves OpenAI's API: `zjax serve`."""

import os
import shlex

import jax
from absl import flags

from zjax.cli import commands
from zjax.cli.usage import Command, flag, integer, number
from zjax.config.flags import settings_given
from zjax.errors import ConfigError, Problem
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling
from zjax.serve import Settings, serve
from zjax.serve.server import check_packages, listen
from zjax.serve.settings import KEY_VARIABLE

_LIMITS = (
    "max_body_bytes",
    "max_prompt_tokens",
    "max_request_rows",
    "max_requests",
    "request_seconds",
    "max_unread_bytes",
    "drain_seconds",
)
"""Flags that are settings of the server under the same names."""


def serve_texts(given: flags.FlagValues) -> None:
    """Serves OpenAI's API with the weights of a checkpoint, until SIGTERM or Ctrl-C."""
    # Whatever is wrong must be told before the weights are read.
    check_packages()
    settings = read_settings(given)
    if not (given.model or given.run or settings_given(given)):
        remedy = "give --run=DIR of a run, or --model=DIR of a Hugging Face checkpoint"
        raise ConfigError(Problem("--run", "", "names nothing to serve", remedy))
    listen(settings).close()
    generator, _ = commands.open_generator(given, commands.generating_settings(given))
    with generator:
        # A client would wait for the programs, and find out whether they run.
        generator.generate([[0]], Sampling(max_new_tokens=2))

        def tell(address: str) -> None:
            print(describe_server(address, generator, settings), flush=True)

        serve(generator, settings, ready=tell)


def read_settings(given: flags.FlagValues) -> Settings:
    """Reads the settings of the server."""
    name = given.served_name or os.path.basename(
        os.path.normpath(given.model or given.run or "model")
    )
    return Settings(
        host=given.host,
        port=given.port,
        api_key=given.api_key or os.environ.get(KEY_VARIABLE, ""),
        served_name=name,
        **{each: getattr(given, each) for each in _LIMITS},
    )


def describe_server(address: str, generator: Generator, settings: Settings) -> str:
    """Describes the model, the limits, and a command to try the server."""
    key = f'-H "Authorization: Bearer ${KEY_VARIABLE}" ' if settings.api_key else ""
    body = shlex.quote('{"prompt": "Once", "max_tokens": 16}')
    longest = settings.max_prompt_tokens or generator.max_length - 1
    return (
        f"serving {settings.served_name!r} at {address}/v1 "
        f"on {jax.devices()[0].device_kind}"
        f"{', with a key' if key else ', without a key'}\n"
        f"limits: prompts of {longest:,} tokens, {generator.max_length:,} with a text; "
        f"{settings.max_requests} requests at once, each of "
        f"{settings.max_request_rows} texts, {settings.max_body_bytes:,} bytes and "
        f"{settings.request_seconds:g} s\n"
        f"try: curl {address}/v1/completions {key}"
        f"-H 'Content-Type: application/json' -d {body}"
    )


SERVE = Command(
    serve_texts,
    "Serves OpenAI's API with the weights of a checkpoint.",
    "zjax serve --run=runs/quickstart\n"
    "zjax serve --model=checkpoints/Qwen3-8B --port=8001 --max_rows=128",
    (
        commands.RUN,
        commands.PART,
        commands.STEP,
        commands.MODEL,
        flag("host", "Address; others than loopback need a key.", Settings.host),
        integer("port", "Port; 0 is a free one.", Settings.port),
        flag("api_key", f"Key that clients send; better set {KEY_VARIABLE}."),
        flag("served_name", "Name of the model; that of the directory by default."),
        commands.MAX_ROWS,
        commands.MAX_LENGTH,
        commands.WEIGHT_DTYPE,
        commands.CACHE_DTYPE,
        commands.NUM_DRAFTS,
        integer("max_requests", "Requests at once.", Settings.max_requests),
        integer("max_request_rows", "Texts of a request.", Settings.max_request_rows),
        integer(
            "max_prompt_tokens", "Tokens of a prompt; 0 is what the model takes.", 0
        ),
        integer("max_body_bytes", "Bytes of a request.", Settings.max_body_bytes),
        integer(
            "max_unread_bytes",
            "Bytes of a stream that wait for a slow client.",
            Settings.max_unread_bytes,
        ),
        number("request_seconds", "Time of a request.", Settings.request_seconds),
        number(
            "drain_seconds",
            "Time for requests to finish after SIGTERM or Ctrl-C.",
            Settings.drain_seconds,
        ),
    ),
)
