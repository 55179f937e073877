"""Which slices of the saved parts of a parameter make up a range of a part of another layout. Pure; no torch.

A tensor-parallel rank holds a part of a parameter. A part is counted in elements, in the order of its memory. With data
parallelism each copy of the model saves a range of its part, a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The range of a part that one rank updates and saves."""

    start: int
    stop: int
    size: int
    """Elements of the whole part."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor-parallel ranks share a parameter: as [blocks, length, width] it is cut along `length` into equal
    ranges."""

    blocks: int
    length: int
    """Without padding, which may follow where there is one block."""
    width: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a parameter in one layout."""

    ranks: int
    """Tensor-parallel ranks."""
    size: int
    """Elements of each part."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive elements of a saved part."""

    rank: int | None
    """The tensor-parallel rank that saved it; None for padding, which is zero."""
    start: int
    size: int


def slices(cut: Cut | None, *, saved: Parts, wanted: Parts, rank: int, start: int, stop: int) -> Iterator[Slice]:
    """Yields the slices that, one after the other, are elements [start, stop) of the wanted part of `rank`.

    `cut`: None where every rank holds the whole parameter. A rank then takes its own copy where it can.
    """
    if cut is None or saved == wanted:
        yield Slice(rank % saved.ranks, start, stop - start)
        return
    there, here = saved.size // cut.blocks, wanted.size // cut.blocks  # elements of a block that a part holds
    position = start
    while position < stop:
        block, offset = divmod(position, here)
        end = min(stop, (block + 1) * here)
        place, filled = rank * here + offset, cut.length * cut.width  # in the whole block
        if place >= filled:
            yield Slice(None, 0, end - position)
            position = end
        else:
            source, first = divmod(place, there)
            size = min(end - position, there - first, filled - place)
            yield Slice(source, block * there + first, size)
            position += size
