"""Packing several documents that are shorter than a cell into one row."""

from __future__ import annotations

import numpy as np

from trainer.arrays import Ints


def pack_rows(lengths: Ints, capacity: int) -> Ints:
    """Best-fit decreasing: the row of each document, int64 [n]; no row holds more than `capacity` tokens.

    Rows are numbered in the order of their first documents. The free room of all open rows is one bit set, so that the
    fullest row that still fits is found in a few machine operations.
    """
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where a row with room r is open
    row_of = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, num_rows
            num_rows += 1
        row_of[document] = row
        left = room - length
        if left:
            rows_with_room[left].append(row)
            rooms |= 1 << left
    first = np.full(num_rows, len(lengths), dtype=np.int64)
    np.minimum.at(first, row_of, np.arange(len(lengths)))
    number = np.empty(num_rows, dtype=np.int64)
    number[np.argsort(first)] = np.arange(num_rows)
    return number[row_of]
