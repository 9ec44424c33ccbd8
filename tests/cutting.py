"""Bytes in pieces: whole, byte by byte, at random cuts, and with something behind them."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from random import Random
from typing import TypeVar

T = TypeVar("T")

JUNK = (b": and a comment", b"\n\n\n", b'data: {"choi', b"junk", b"data: \xe6\xbc")


def cut(data: bytes, points: Iterable[int]) -> list[bytes]:
    """Cut at some points; a point that comes twice makes an empty piece."""
    edges = [0, *sorted(points), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def ways(data: bytes, number: int = 40) -> Iterator[list[bytes]]:
    """Yield the same bytes in pieces: whole, byte by byte, by event, and in random ways, the same at every run."""
    events = [blank.end() for blank in re.finditer(rb"\n\n|\r\n\r\n", data)]
    yield [data]
    yield cut(data, range(1, len(data)))
    yield cut(data, events)
    random = Random(len(data))
    for _ in range(number):
        points = random.choices(range(len(data) + 1), k=random.randint(1, 12))
        yield cut(data, points)
        yield cut(data, [*events, *points[:3]])


def read_in_every_cut(read: Callable[[Iterable[bytes]], list[T]], data: bytes) -> list[T]:
    """Return what `read` makes of the bytes, which is the same however they are cut and whatever comes behind them."""
    expected = read([data])
    for pieces in ways(data):
        assert read(pieces) == expected
    for junk in JUNK:
        for pieces in ways(data + junk, 5):
            assert read(pieces)[: len(expected)] == expected
    return expected
