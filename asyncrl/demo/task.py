"""The demo's task: put the letters of a word in alphabetical order, `ehcbk=` → `bcehk`.

The warm-up's teacher is careless: three times of four it puts the vowels first (`ehcbk=` → `ebchk`). Imitation cannot
become better than its teacher, whose habit the greedy policy takes over, so it is right only where both orders agree:
about one word in four. GRPO asks a reward that knows the rule, and can.

Invariants
- Held-out words share no set of letters with words for training or warm-up: not even an anagram was seen.
- The same seed gives the same words on every machine.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

ALPHABET = "abcdefghijklmnop"
VOWELS = "aeio"
SHORTEST, LONGEST = 4, 8
"""Letters in a word, all different."""
CARELESS = 0.75
"""Fraction of warm-up answers that have the vowels first."""
HELD_OUT_PART = 8
"""One set of letters in this many is held out."""


def train_prompts(size: int = 4096, seed: int = 0) -> Iterator[dict[str, str]]:
    """Words with their right answers: `size` records of prompt and answer."""
    for word in _words(size, seed, held_out=False):
        yield {"prompt": prompt(word), "answer": in_order(word)}


def heldout_prompts(size: int = 512, seed: int = 1) -> Iterator[dict[str, str]]:
    """Different words that neither training nor warm-up can see: `size` records of prompt and answer."""
    for word in _words(size, seed, held_out=True):
        yield {"prompt": prompt(word), "answer": in_order(word)}


def warmup_examples(size: int = 8192, seed: int = 2) -> Iterator[dict[str, str]]:
    """What the careless teacher wrote: `size` records of prompt and response."""
    rng = random.Random(f"teacher {seed}")
    for word in _words(size, seed, held_out=False):
        response = vowels_first(word) if rng.random() < CARELESS else in_order(word)
        yield {"prompt": prompt(word), "response": response}


def prompt(word: str) -> str:
    """The question put to the model."""
    return f"{word}="


def in_order(word: str) -> str:
    """The right answer: letters in alphabetical order."""
    return "".join(sorted(word))


def vowels_first(word: str) -> str:
    """The careless answer: vowels in order, then consonants in order."""
    return "".join(sorted(word, key=lambda letter: (letter not in VOWELS, letter)))


def is_held_out(word: str) -> bool:
    """Decided by the set of letters alone."""
    return zlib.crc32(in_order(word).encode()) % HELD_OUT_PART == 0


def _words(size: int, seed: int, *, held_out: bool) -> Iterator[str]:
    """`size` different words from one side of the division."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < size:
        word = "".join(rng.sample(ALPHABET, rng.randint(SHORTEST, LONGEST)))
        if word not in seen and is_held_out(word) == held_out:
            seen.add(word)
            yield word
