"""The demo's task: put the letters of a word in alphabetical order, `ehcbk=` → `bcehk`.

The warm-up learns from a careless teacher, which puts the vowels first in three of four answers (`ehcbk=` → `ebchk`). A
policy that imitates it adopts this habit when it decodes greedily. It is then right only where both orders agree, for
about one word in four. GRPO learns from a reward that knows the rule, so it can become better than the teacher.

Invariants
- A held-out word never has the same set of letters as a word for training or warm-up: no anagram of it was seen.
- The same seed gives the same words on every machine.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

ALPHABET = "abcdefghijklmnop"
"""Letters that words are made of."""
VOWELS = "aeio"
"""Letters that the careless teacher puts first."""
SHORTEST, LONGEST = 4, 8
"""Number of letters in a word, all different."""
CARELESS = 0.75
"""Fraction of warm-up answers that have the vowels first."""
HELD_OUT_PART = 8
"""One in this many sets of letters is held out."""


def train_prompts(size: int = 4096, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yields `size` records of a word as `prompt` and its right `answer`."""
    for word in _words(size, seed, held_out=False):
        yield {"prompt": prompt(word), "answer": in_order(word)}


def heldout_prompts(size: int = 512, seed: int = 1) -> Iterator[dict[str, str]]:
    """Yields `size` records like `train_prompts`, of words that neither training nor warm-up can see."""
    for word in _words(size, seed, held_out=True):
        yield {"prompt": prompt(word), "answer": in_order(word)}


def warmup_examples(size: int = 8192, seed: int = 2) -> Iterator[dict[str, str]]:
    """Yields `size` records of a word as `prompt` and the careless teacher's `response`."""
    rng = random.Random(f"teacher {seed}")
    for word in _words(size, seed, held_out=False):
        response = vowels_first(word) if rng.random() < CARELESS else in_order(word)
        yield {"prompt": prompt(word), "response": response}


def prompt(word: str) -> str:
    """Returns the prompt for a word."""
    return f"{word}="


def in_order(word: str) -> str:
    """Returns the right answer: the letters in alphabetical order."""
    return "".join(sorted(word))


def vowels_first(word: str) -> str:
    """Returns the careless answer: the vowels in order, then the consonants in order."""
    return "".join(sorted(word, key=lambda letter: (letter not in VOWELS, letter)))


def is_held_out(word: str) -> bool:
    """True if a word is held out; the set of its letters alone decides that."""
    return zlib.crc32(in_order(word).encode()) % HELD_OUT_PART == 0


def _words(size: int, seed: int, *, held_out: bool) -> Iterator[str]:
    """Yields `size` different words, all held out or none of them."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < size:
        word = "".join(rng.sample(ALPHABET, rng.randint(SHORTEST, LONGEST)))
        if word not in seen and is_held_out(word) == held_out:
            seen.add(word)
            yield word
