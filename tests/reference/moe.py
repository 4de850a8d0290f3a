"""Routing as loops over tokens and experts, in float64."""

import math

import numpy as np


def softmax(x):
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def queue(drop, experts, scores):
    """The order in which choices ask the experts for room."""
    num_tokens, top_k = experts.shape
    pairs = [(t, k) for t in range(num_tokens) for k in range(top_k)]
    if drop == "first_choices":
        return sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    if drop == "probability":
        return sorted(pairs, key=lambda pair: (-scores[pair[0], experts[pair]], pair))
    return pairs


def route(logits, top_k, drop="none", factor=1.0, sigmoid=False, bias=0.0):
    """Experts, weights and which are kept, of each token."""
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else softmax(logits)
    experts = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :top_k]
    num_tokens, num_experts = logits.shape
    capacity = math.ceil(num_tokens * top_k * factor / num_experts)
    taken, kept = np.zeros(num_experts, int), np.zeros(experts.shape, bool)
    for token, choice in queue(drop, experts, scores):
        expert = experts[token, choice]
        if drop == "none" or taken[expert] < capacity:
            taken[expert] += 1
            kept[token, choice] = True
    weights = np.zeros(experts.shape)
    for token in range(num_tokens):
        own = kept[token] * scores[token, experts[token]]
        weights[token] = own / max(own.sum(), 1e-30) if top_k > 1 else own
    return experts, weights, kept


def choose_tokens(logits, capacity, sigmoid=False):
    """Scores of the tokens that each expert takes, one after another; 0 for others."""
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else softmax(logits)
    weights = np.zeros(scores.shape)
    for expert, column in enumerate(scores.T):
        tokens = sorted(range(len(column)), key=lambda token: (-column[token], token))
        for token in tokens[:capacity]:
            weights[token, expert] = column[token]
    return weights


def balance_loss(logits, experts):
    """E / k sum_e (mean score) (mean choices)."""
    (num_tokens, num_experts), top_k = logits.shape, experts.shape[1]
    scores, total = softmax(logits), 0.0
    for expert in range(num_experts):
        load = sum((experts[token] == expert).sum() for token in range(num_tokens))
        total += scores[:, expert].mean() * load / num_tokens
    return num_experts / top_k * total
