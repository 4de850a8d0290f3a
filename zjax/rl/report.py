"""What a run of reinforcement learning tells of its texts: metrics and samples."""

import pathlib
from collections.abc import Sequence

import numpy as np

from zjax.files import new_file, writing
from zjax.rl.rollouts import Rollout

_MOST_SHOWN = 2_000
"""Most characters of a text in a file of samples."""


def pass_rates(rollouts: Sequence[Rollout], function: str) -> dict[str, float]:
    """Computes how many texts, and how many prompts, are solved.

    A text solves its prompt if a reward function returns 1 or more, and no judge leaves
    the text without a reward.

    Args:
        rollouts: Scored texts, one or more.
        function: Name of the reward function.

    Returns:
        `pass_at_1`, the share of texts, and `pass_at_k`, the share of prompts that any
        of the texts solves.
    """
    solved = dict[int, list[bool]]()
    for rollout in rollouts:
        reward = rollout.rewards[function]
        is_scored = None not in rollout.rewards.values()
        solved.setdefault(rollout.prompt, []).append(is_scored and (reward or 0) >= 1)
    groups = [*solved.values()]
    return {
        "pass_at_1": float(np.mean([x for group in groups for x in group])),
        "pass_at_k": float(np.mean([any(group) for group in groups])),
    }


def write_samples(
    path: pathlib.Path,
    rollouts: Sequence[Rollout],
    totals: Sequence[float] | np.ndarray,
) -> None:
    """Writes the texts of the first prompt with the best and the worst reward, to read.

    Args:
        path: File to write.
        rollouts: Texts, by prompt.
        totals: Reward of each text; NaN for none.
    """
    first = [n for n, x in enumerate(rollouts) if x.prompt == rollouts[0].prompt]
    ranked = sorted(first, key=lambda n: np.nan_to_num(totals[n], nan=-np.inf))
    shown = dict.fromkeys([ranked[-1], ranked[0]])
    blocks = [f"prompt:\n{str(rollouts[0].given)[:_MOST_SHOWN]}"]
    for number in shown:
        rollout = rollouts[number]
        head = f"reward {totals[number]:.4g}, {len(rollout.ids)} tokens"
        head += f", ends by {rollout.finish_reason}"
        blocks.append(f"{head}:\n{rollout.text[:_MOST_SHOWN]}")
    with writing(path), new_file(path) as partial:
        partial.write_text("\n\n".join(blocks) + "\n", "utf-8", "backslashreplace")
