"""A server of OpenAI's API over one generator: limits, streams, metrics and a drain."""

from zjax.serve.server import serve, serving
from zjax.serve.settings import Settings

__all__ = ["Settings", "serve", "serving"]
