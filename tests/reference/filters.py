"""Filters and penalties of logits, one row at a time, in float64."""

import numpy as np


def kept_by_top_k(row, k):
    if k == 0:
        return np.ones(len(row), bool)
    return row >= sorted(row, reverse=True)[k - 1]


def kept_by_top_p(row, p):
    if p == 1:
        return np.ones(len(row), bool)
    likelihoods = softmax(row)
    kept = np.zeros(len(row), bool)
    for number, logit in enumerate(row):
        kept[number] = likelihoods[row > logit].sum() < p and logit > -np.inf
    return kept


def kept_by_min_p(row, p):
    likelihoods = softmax(row)
    return likelihoods >= p * likelihoods.max()


def softmax(row):
    weights = np.exp(np.asarray(row, np.float64) - np.max(row))
    return weights / weights.sum()


def penalise(row, prompt, written, *, repetition=1.0, presence=0.0, frequency=0.0):
    """Applies penalties token by token."""
    row = np.array(row, np.float64)
    for token in {*prompt, *written}:
        row[token] = (
            row[token] / repetition if row[token] > 0 else row[token] * repetition
        )
    for token in {*written}:
        row[token] -= presence
    for token in written:
        row[token] -= frequency
    return row


def distribution(row, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities of a draw."""
    row = np.asarray(row, np.float64) / temperature
    row = np.where(kept_by_top_k(row, top_k), row, -np.inf)
    row = np.where(kept_by_top_p(row, top_p), row, -np.inf)
    row = np.where(kept_by_min_p(row, min_p), row, -np.inf)
    return softmax(row)
