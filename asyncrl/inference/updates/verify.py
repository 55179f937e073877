"""Did the weights arrive? Decided from the checksums that engines report. Pure.

An engine answers 200 to a tensor whose name it does not know, and keeps its old values. On the first publication the
old values may be equal to the new ones, since the engine loaded the same checkpoint from disk. So its tensors are
overwritten with random numbers first (`reset_tensors`): a tensor whose checksum stays the same was not received.

What this cannot see: the engine fuses tensors (query, key and value; gate and up), and one of which only a part arrived
has another checksum too. A fleet of several engines sees it, since each keeps random numbers of its own there; for one
engine it rests on the trainer, whose exported names are those that it found in the checkpoint, all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from asyncrl.errors import counted
from asyncrl.inference.sglang.engine_api import Checksums

_SHOWN = 5


def unreceived(before: Checksums, after: Checksums) -> tuple[str, ...]:
    """Tensors (of any rank) whose checksum did not change."""
    names: set[str] = set()
    for old, new in zip(before, after, strict=True):
        names |= {name for name, checksum in new.checksums.items() if old.checksums.get(name) == checksum}
    return tuple(sorted(names))


def disagreement(checksums: Mapping[str, Checksums]) -> dict[str, tuple[str, ...]]:
    """Engines that differ from what most of them hold → the tensors in which they do.

    If no values are held by more engines than any others, it cannot be known which are right. All engines are accused
    then, each of the tensors in which it differs from another. Only engines with the same number of ranks hold the same
    shards, and are compared.
    """
    found: dict[str, tuple[str, ...]] = {}
    for ranks in {len(sums) for sums in checksums.values()}:
        found |= _disagreement_of_peers({engine: sums for engine, sums in checksums.items() if len(sums) == ranks})
    return found


def _disagreement_of_peers(checksums: Mapping[str, Checksums]) -> dict[str, tuple[str, ...]]:
    keys = {engine: tuple(rank.per_gpu_checksum for rank in ranks) for engine, ranks in checksums.items()}
    counts = Counter(keys.values()).most_common()
    if len(counts) <= 1:
        return {}
    (most, count), (second, runner_up) = counts[:2]
    holder = {key: checksums[engine] for engine, key in keys.items()}
    if count > runner_up:
        return {engine: differing(holder[most], checksums[engine]) for engine, key in keys.items() if key != most}
    return {
        engine: differing(holder[second if key == most else most], checksums[engine]) for engine, key in keys.items()
    }


def differing(reference: Checksums, actual: Checksums) -> tuple[str, ...]:
    """Tensors in which `actual` differs from `reference`, missing ones included."""
    if len(reference) != len(actual):
        return (f"{counted(len(actual), 'rank')} instead of {len(reference)}",)
    names: set[str] = set()
    for expected, found in zip(reference, actual, strict=True):
        every = expected.checksums.keys() | found.checksums.keys()
        names |= {name for name in every if expected.checksums.get(name) != found.checksums.get(name)}
    return tuple(sorted(names))


def abbreviate(names: Sequence[str]) -> str:
    """`a, b, c, d, e and 3 more`."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
