"""Documents packed into rows, one token at a time."""


def cut(documents, length):
    """Pieces of at most `length` tokens: (tokens, targets), None where none is due."""
    pieces = []
    for document in documents:
        pairs = list(zip(document, [*document[1:], None], strict=True))
        pieces += [pairs[at : at + length] for at in range(0, len(pairs), length)]
    return pieces


def first_fit(sizes, length, window):
    """Rows as lists of piece numbers: whole ones, then window after window."""
    rows = [[piece] for piece, size in enumerate(sizes) if size == length]
    part = [piece for piece, size in enumerate(sizes) if size < length]
    for at in range(0, len(part), window):
        opened = []
        for piece in sorted(part[at : at + window], key=lambda p: -sizes[p]):
            for row in opened:
                if sum(sizes[other] for other in row) + sizes[piece] <= length:
                    row.append(piece)
                    break
            else:
                opened.append([piece])
        rows += opened
    return [sorted(row) for row in rows]


def fields(pieces, length):
    """The five fields of one row."""
    names = ("tokens", "targets", "segment_ids", "positions", "weights")
    row = {name: [] for name in names}
    for segment, piece in enumerate(pieces, start=1):
        for position, (token, target) in enumerate(piece):
            values = (token, target or 0, segment, position, float(target is not None))
            for name, value in zip(names, values, strict=True):
                row[name].append(value)
    return {name: values + [0] * (length - len(values)) for name, values in row.items()}
