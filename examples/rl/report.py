"""Report card: how many texts of held-out prompts are right, with samples."""

import zjax

NUM_SAMPLES = 8
NUM_SHOWN = 3


def draw(trainer, prompts, *, seed=0, num_samples=NUM_SAMPLES):
    """Draws several texts of each prompt from the weights of a trainer.

    Returns:
        List of texts by prompt.
    """
    sampling = zjax.Sampling(
        max_new_tokens=32, temperature=1.0, num_samples=num_samples, seed=seed
    )
    with zjax.Generator(trainer.run, trainer.state, max_rows=128) as generator:
        texts = generator.generate(prompts, sampling)
    found = [[] for _ in prompts]
    for text in texts:
        found[text.prompt].append(text.text)
    return found


def solve(trainer, task, rows, **options):
    """Draws texts of the prompts of a task, and verifies them.

    Returns:
        Pairs of a prompt and its texts, each with a reward of 1 or 0.
    """
    drawn = draw(trainer, [row["prompt"] for row in rows], **options)
    return [
        (row["prompt"], [(text, task.reward(completion=text, **row)) for text in texts])
        for row, texts in zip(rows, drawn, strict=True)
    ]


def pass_rates(texts):
    """Share of texts that are right, and of prompts with one right text or more."""
    solved = [[reward for _, reward in found] for _, found in texts]
    flat = [reward for found in solved for reward in found]
    return sum(flat) / len(flat), sum(map(max, solved)) / len(solved)


def show(cards):
    """Prints the card of each stage, and the first text of some prompts.

    Args:
        cards: Verified texts of held-out prompts, of `solve`, by stage.
    """
    print(f"\n{'held-out prompts':20}  pass@1  pass@{NUM_SAMPLES}")
    for stage, texts in cards.items():
        each, any_of = pass_rates(texts)
        print(f"{stage:20}  {each:6.1%}  {any_of:6.1%}")
    for stage, texts in cards.items():
        for prompt, found in texts[:NUM_SHOWN]:
            text, reward = found[0]
            print(f"{stage}, {'right' if reward else 'wrong'}: {prompt + text!r}")
