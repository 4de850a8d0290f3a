"""Schedules as the papers write them, per stage and in order, and what they take.

A pass is (kind, microbatch, chunk), of kinds F, B and W. Where W does not occur, B
makes the gradients of weights too.
"""

import collections


def one_f_one_b(num_stages, num_microbatches):
    """Narayanan et al., arXiv:2006.09503."""
    orders = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage - 1, num_microbatches)
        forward = [("F", m, 0) for m in range(num_microbatches)]
        backward = [("B", m, 0) for m in range(num_microbatches)]
        orders.append(alternate(forward, backward, warmup))
    return orders


def interleaved(num_stages, num_microbatches, num_chunks):
    """Narayanan et al., arXiv:2104.04473."""
    total = num_microbatches * num_chunks

    def unit(k, backward):
        group, rest = divmod(k, num_stages * num_chunks)
        chunk = rest // num_stages
        chunk = num_chunks - 1 - chunk if backward else chunk
        return group * num_stages + rest % num_stages, chunk

    orders = []
    for stage in range(num_stages):
        warmup = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
        warmup = total if num_microbatches == num_stages else min(warmup, total)
        forward = [("F", *unit(k, False)) for k in range(total)]
        backward = [("B", *unit(k, True)) for k in range(total)]
        orders.append(alternate(forward, backward, warmup))
    return orders


def alternate(forward, backward, warmup):
    order = forward[:warmup]
    for f, b in zip(forward[warmup:], backward, strict=False):
        order += [f, b]
    return order + backward[len(forward) - warmup :]


def zero_bubble(num_stages, num_microbatches, *, second=False):
    """Qi et al., arXiv:2401.10241: H1, or H2."""
    orders = []
    for stage in range(num_stages):
        warmup = 2 * (num_stages - stage) - 2 if second else num_stages - stage - 1
        warmup = min(warmup, num_microbatches)
        start = 2 * stage if second else stage
        order = [("F", m, 0) for m in range(warmup)]
        pending = collections.deque()
        for i in range(num_microbatches):
            if warmup + i < num_microbatches:
                order.append(("F", warmup + i, 0))
            order.append(("B", i, 0))
            pending.append(("W", i, 0))
            if i >= start or warmup + i >= num_microbatches:
                order.append(pending.popleft())
        orders.append([*order, *pending])
    return orders


def simulate(orders, costs, num_chunks=1):
    """Runs each stage's passes in order, each as soon as what it reads is there.

    Returns start and end of every pass by (stage, kind, microbatch, chunk), in units of
    `costs` by kind of a whole stage.
    """
    num_stages, done = len(orders), {}
    queues = [collections.deque(order) for order in orders]
    free = [0.0] * num_stages
    while any(queues):
        ready = [
            stage
            for stage, queue in enumerate(queues)
            if queue
            and all(x in done for x in reads(stage, queue[0], orders, num_chunks))
        ]
        assert ready, "the passes wait for each other"
        for stage in ready:
            kind, microbatch, chunk = one = queues[stage].popleft()
            ends = [done[x][1] for x in reads(stage, one, orders, num_chunks)]
            start = max([free[stage], *ends])
            free[stage] = start + costs[kind] / num_chunks
            done[stage, kind, microbatch, chunk] = start, free[stage]
    return done


def reads(stage, one, orders, num_chunks):
    """The passes whose results one pass of a stage reads."""
    kind, microbatch, chunk = one
    size = len(orders)
    place = chunk * size + stage
    if kind == "W":
        return [(stage, "B", microbatch, chunk)]
    own = [(stage, "F", microbatch, chunk)] if kind == "B" else []
    place += 1 if kind == "B" else -1
    if not 0 <= place < size * num_chunks:
        return own
    return [*own, (place % size, kind, microbatch, place // size)]


def makespan(done):
    return max(end for _, end in done.values())


def most_alive(done, stage):
    """Forward passes of a stage whose backward pass has not ended, at most."""
    spans = [
        (start, done[stage, "B", m, c][1])
        for (s, kind, m, c), (start, _) in done.items()
        if (s, kind) == (stage, "F")
    ]
    return max(sum(a <= start < b for a, b in spans) for start, _ in spans)
