"""A curriculum over lists of values, one sample at a time, from the first step on."""

import numpy as np

from tests.reference import sampling

BLOCK = 256


def admitted(values, difficulty, is_percentile):
    """Samples that a difficulty admits."""
    if not is_percentile:
        return {i for i, value in enumerate(values) if value <= difficulty}
    ordered = sorted(range(len(values)), key=lambda i: (values[i], i))
    if difficulty >= 100:
        return set(ordered)
    return set(ordered[: len(values) // 100 * difficulty])


def cluster_order(metrics, members):
    """Samples of a cluster before they are shuffled."""
    if len(metrics) > 1:
        return sorted(members)
    values = metrics[0][0]
    return sorted(members, key=lambda i: (values[i], i))


def points(seed, step, num_draws):
    generator = np.random.default_rng([seed, 2, step // BLOCK])
    return generator.random((BLOCK, num_draws))[step % BLOCK].tolist()


def batches(metrics, num_steps, seed, size):
    """Batches of the first steps.

    Args:
        metrics: Values of all samples, difficulty by step (from 1), is_percentile.
        num_steps: Steps.
        seed: Seed.
        size: Samples per batch.
    """
    clusters, used, seen, result = [], [], set(), []
    for step in range(num_steps):
        new = set.intersection(
            *(admitted(values, at(step + 1), kind) for values, at, kind in metrics)
        )
        if new - seen:
            clusters.append(cluster_order(metrics, new - seen))
            used.append(0)
            seen |= new
        total, batch = sum(map(len, clusters)), []
        for point in points(seed, step, size):
            place, number = point * total, 0
            while place >= sum(len(cluster) for cluster in clusters[: number + 1]):
                number += 1
            cluster = clusters[number]
            epoch, within = divmod(used[number], len(cluster))
            used[number] += 1
            key = (seed, 1, number)
            batch.append(cluster[sampling.permuted(within, len(cluster), key, epoch)])
        result.append(batch)
    return result
