"""The demo's task: held-out words, the careless teacher, and right answers."""

from __future__ import annotations

import itertools

from asyncrl.demo import task


def words(records: list[dict[str, str]]) -> list[str]:
    return [record["prompt"].removesuffix("=") for record in records]


def test_held_out_words_share_no_set_of_letters_with_training_or_warm_up() -> None:
    for seed in range(3):
        seen = words(list(task.train_prompts(4096, seed)) + list(task.warmup_examples(8192, seed)))
        held_out = words(list(task.heldout_prompts(1024, seed)))
        assert not {frozenset(word) for word in seen} & {frozenset(word) for word in held_out}
        assert len(set(held_out)) == 1024


def test_the_same_seed_gives_the_same_records_and_another_seed_others() -> None:
    for source in (task.train_prompts, task.heldout_prompts, task.warmup_examples):
        assert list(source(50, seed=7)) == list(source(50, seed=7)) != list(source(50, seed=8))


def test_more_records_begin_with_the_same_ones() -> None:
    assert list(itertools.islice(task.train_prompts(500), 50)) == list(task.train_prompts(50))


def test_answers_are_the_letters_in_alphabetical_order() -> None:
    for record in task.heldout_prompts(200):
        word = record["prompt"].removesuffix("=")
        assert record["answer"] == "".join(sorted(word))
        assert task.SHORTEST <= len(word) == len(set(word)) <= task.LONGEST


def test_the_teacher_puts_vowels_first_about_three_times_of_four() -> None:
    records = list(task.warmup_examples(4096))
    two_orders = [r for r in records if task.vowels_first(r["prompt"][:-1]) != task.in_order(r["prompt"][:-1])]
    careless = [r for r in two_orders if r["response"] == task.vowels_first(r["prompt"][:-1])]
    careful = [r for r in two_orders if r["response"] == task.in_order(r["prompt"][:-1])]
    assert len(careless) + len(careful) == len(two_orders)
    assert 0.72 < len(careless) / len(two_orders) < 0.78


def test_a_perfect_imitator_of_the_teacher_is_weak_but_not_hopeless() -> None:
    held_out = words(list(task.heldout_prompts(512)))
    accuracy = sum(task.vowels_first(word) == task.in_order(word) for word in held_out) / len(held_out)
    assert 0.2 < accuracy < 0.4


def test_the_example_in_the_text_is_true() -> None:
    assert (task.prompt("ehcbk"), task.in_order("ehcbk"), task.vowels_first("ehcbk")) == ("ehcbk=", "bcehk", "ebchk")
