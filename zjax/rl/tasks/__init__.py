"""Tasks whose answers a function verifies, made without a download.

Each module has `rows` (prompts, by seed and level), `reward` (the verifier, a reward
function) and `trace` (a solved completion, to learn from before any reward is found).
The last line of a completion is the answer.
"""

from zjax.rl.tasks import countdown, reverse, sums

__all__ = ["countdown", "reverse", "sums"]
