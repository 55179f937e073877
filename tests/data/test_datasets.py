from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncrl.config.sections.data import DataConfig
from asyncrl.data import sources
from asyncrl.data.datasets import PromptSet, load_prompts
from asyncrl.data.sources import Progress
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import ConfigError, DataError
from tests.tiny_policy import CHAT_TEMPLATE, write_policy

ROWS = [{"prompt": f"{i}+1=?", "answer": str(i + 1)} for i in range(6)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return PolicyTokenizer.load(write_policy(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return PolicyTokenizer.load(write_policy(tmp_path_factory.mktemp("chat"), chat_template=CHAT_TEMPLATE))


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(source: object, tokenizer: PolicyTokenizer, limit: int = 50, **config: Any) -> PromptSet:
    return load_prompts(DataConfig(source=str(source), **config), tokenizer, max_prompt_tokens=limit)


def generate(count: int, seed: int = 7, size: int | None = None) -> Iterator[dict[str, Any]]:
    """A user's own source."""
    for i in range(count):
        yield {"prompt": f"{i} {seed} {size}", "answer": i}


def endless() -> Iterator[dict[str, Any]]:
    for i in itertools.count():
        yield {"prompt": f"{i}", "answer": f"{i}"}


def repeating() -> Iterator[dict[str, Any]]:
    yield from [{"prompt": "1", "answer": "1"}, {"prompt": "1", "answer": "2"}]


def broken() -> Iterator[dict[str, Any]]:
    yield {"prompt": "1", "answer": "1"}
    raise KeyError("oops")


def test_jsonl_keeps_order_ids_and_records(tmp_path: Path, plain: PolicyTokenizer) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("\ufeff" + json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1] | {"extra": [1]}) + "\n")
    prompts = load(file, plain).prompts
    assert [p.prompt_id for p in prompts] == ["train.jsonl:1", "train.jsonl:3"]
    assert [p.answer for p in prompts] == ["1", "2"]
    assert prompts[1].text == "1+1=?"
    assert np.array_equal(prompts[1].token_ids, plain.encode(["1+1=?"], add_special_tokens=True)[0])
    assert prompts[1].record["extra"] == [1]


def test_every_source_yields_the_same_prompts(tmp_path: Path, plain: PolicyTokenizer) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    write_jsonl(tmp_path / "a.jsonl", ROWS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "hub/data/train-00000-of-00001.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), tmp_path / "hub/data/test-00000-of-00001.parquet")

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(ROWS, indent=2))
    (tmp_path / "lines.json").write_bytes((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "a.csv").write_text(
        "\ufeffanswer,prompt\r\n" + "".join(f'{r["answer"]},"{r["prompt"]}"\r\n' for r in ROWS)
    )
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "dataset_info.json").write_text("{}")
    (tmp_path / "files" / "train.json.gz").write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))

    expected = [(p.text, p.answer) for p in load(tmp_path / "a.jsonl", plain).prompts]
    assert len(expected) == 6
    made = ("a.jsonl.gz", "a.json", "lines.json", "a.csv", "files")
    for source in ("a.parquet", "saved", "splits", "hub", *made):
        prompts = load(tmp_path / source, plain).prompts
        assert [(p.text, p.answer) for p in prompts] == expected, source
        assert len({p.prompt_id for p in prompts}) == 6, source
    for source in ("splits", "hub"):
        assert len(load(tmp_path / source, plain, split="test").prompts) == 1
        with pytest.raises(DataError, match=r"data.split"):
            load(tmp_path / source, plain, split="nope")


def test_a_reasoning_gym_task_is_the_same_for_the_same_seed(plain: PolicyTokenizer) -> None:
    def questions(seed: int) -> list[str]:
        config = DataConfig(
            source="reasoning_gym:leg_counting", size=4, seed=seed, args={"min_animals": 1, "max_animals": 3}
        )
        tokenizer = plain
        return [p.record["question"] for p in load_prompts(config, tokenizer, max_prompt_tokens=1000).prompts]

    assert len(questions(1)) == 4 and questions(1) == questions(1) != questions(2)


def test_a_function_gets_its_args_and_seed_and_size(plain: PolicyTokenizer) -> None:
    prompts = load(f"{__name__}:generate", plain, args={"count": 5}, seed=9, size=3).prompts
    assert [p.text for p in prompts] == ["0 9 3", "1 9 3", "2 9 3"]
    assert [p.answer for p in prompts] == ["0", "1", "2"]


def test_size_limits_a_file(tmp_path: Path, plain: PolicyTokenizer) -> None:
    assert len(load(write_jsonl(tmp_path / "a.jsonl", ROWS), plain, size=2).prompts) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"question": "x", "answer": "y"}',
            r'line 2: field "prompt" is missing \(found: question, answer\); set data.prompt_key',
        ),
        ('{"prompt": "x"}', r'line 2: field "answer" is missing \(found: prompt\); set data.answer_key'),
        (
            '{"prompt": 3, "answer": "y"}',
            r'line 2: field "prompt" must be a string or a list of chat messages, but it is int; set data.prompt_key',
        ),
        (
            '{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "text": "x"}], "answer": "y"}',
            r"chat messages, but message 2 has no `content` \(found: role, text\)$",
        ),
        ('{"prompt": [{"content": "x"}], "answer": "y"}', r"but message 1 has no `role` \(found: content\)$"),
        ('{"prompt": [{"role": 1, "content": "x"}], "answer": "y"}', "the `role` of message 1 is int, not a string"),
        ('{"prompt": ["x"], "answer": "y"}', "message 1 is str, not an object with `role` and `content`"),
        ('{"prompt": [], "answer": "y"}', "but it is an empty list"),
        ('{"prompt": [{"role": "user", "content": "x"}], "answer": "y"}', "line 2: .* holds chat messages"),
        ('{"prompt": "", "answer": "y"}', "line 2: the prompt is empty"),
        ('{"prompt": "x", ', "line 2: not valid JSON"),
        ("[1, 2]", "line 2: expected a JSON object, found list"),
    ],
)
def test_a_bad_line_is_named_with_file_and_line(
    tmp_path: Path, plain: PolicyTokenizer, line: str, message: str
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(DataError, match=message) as error:
        load(file, plain)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"prompt": "1", "answer": "1"}, 3]', r"a\.json record 1: expected a JSON object, found int"),
        ("a.json", b'[{"prompt": "1"', r"a\.json: not valid JSON"),
        (
            "a.json",
            b'{\n"data": [] }',
            r"line 1: not valid JSON .*; a \.json file holds a list of objects, or one object",
        ),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz cannot be read \(Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "1", "answer": "1"}\n')[:-9], r"a\.jsonl\.gz cannot be read \("),
        ("a.csv", b'prompt,answer\n1,1\n\n"2\n2",2\n3\n', r"line 6: 1 values for the 2 columns prompt, answer"),
        ("a.csv", b'prompt,answer\n1,1\n"2,2\n', r"line 3: not valid CSV \(unexpected end of data"),
        ("a.csv", b"prompt,answer\n1,\xff\n", r"a\.csv line \d: not valid CSV .*0xff"),
        ("a.csv", b"prompt,prompt\n", r"line 1: two columns have the same name"),
        ("a.csv", b"question,answer\n1,1\n", r'line 2: field "prompt" is missing \(found: question, answer\)'),
    ],
)
def test_a_defect_of_a_file_is_named_with_its_line(
    tmp_path: Path, plain: PolicyTokenizer, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name, plain)


def test_a_value_of_a_csv_file_may_be_long_and_have_lines(tmp_path: Path, plain: PolicyTokenizer) -> None:
    (tmp_path / "a.csv").write_text('prompt,answer\n"1\n2",1\n' + "x" * 200_000 + ",2\n")
    first, second = load(tmp_path / "a.csv", plain, limit=300_000).prompts
    assert (first.text, first.prompt_id) == ("1\n2", "a.csv:2") and second.prompt_id == "a.csv:4"
    assert len(second.text) == 200_000


def test_keys_reach_into_nested_fields_and_lists(tmp_path: Path, plain: PolicyTokenizer) -> None:
    row = {
        "turns": [{"text": "1+1"}, {"text": "2+2"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": 4}},
        "dotted.name": "own",
    }
    file = write_jsonl(tmp_path / "a.jsonl", [row])

    def loaded(prompt_key: str, answer_key: str) -> tuple[str, str | None]:
        (prompt,) = load(file, plain, prompt_key=prompt_key, answer_key=answer_key).prompts
        return prompt.text, prompt.answer

    assert loaded("turns.0.text", "reward_model.ground_truth.target") == ("1+1", "4")
    assert loaded("turns.-1.text", "reward_model.style") == ("2+2", "rule")
    assert loaded("turns.1.text", "dotted.name") == ("2+2", "own")
    for key, message in [
        ("reward_model.truth", r"is missing \(found in reward_model: style, ground_truth\); set data\.answer_key"),
        ("turns.2.text", r"is missing \(found in turns: a list of 2\)"),
        ("turns.text", r"is missing \(found in turns: a list of 2\)"),
        ("reward_model.style.x", r"is missing \(found in reward_model\.style: str\)"),
        ("target", r"is missing .*did you mean reward_model\.ground_truth\.target\?"),
    ]:
        with pytest.raises(DataError, match=message):
            loaded("turns.0.text", key)


SOLUTION = "She has 2+2=<<2+2=4>>4.\n#### {}"


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("42", "42"),
        (" 1,234 ", "1234"),
        ("-1,234,567.5", "-1234567.5"),
        ("$1,000", "$1000"),
        ("(1,2)", "(1,2)"),
        ("1, 2", "1, 2"),
    ],
)
def test_the_answer_after_a_marker_is_taken(tmp_path: Path, plain: PolicyTokenizer, written: str, answer: str) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": SOLUTION.format(written)}])
    assert load(file, plain, answer_after="####").prompts[0].answer == answer


def test_an_answer_without_the_marker_is_named(tmp_path: Path, plain: PolicyTokenizer) -> None:
    for text in ("4", "4 ####"):
        file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": text}])
        with pytest.raises(DataError, match=r"line 1: field \"answer\" holds nothing after '####'"):
            load(file, plain, answer_after="####")


def test_worked_solutions_are_told_with_the_setting_that_takes_their_end(
    tmp_path: Path, plain: PolicyTokenizer
) -> None:
    rows = [{"prompt": f"{i}", "answer": SOLUTION.format(i)} for i in range(3)]
    (warning,) = told(write_jsonl(tmp_path / "a.jsonl", rows), plain).values()
    assert 'data.answer_after = "####" takes the end' in warning["event"] and warning["count"] == 3
    assert told(tmp_path / "a.jsonl", plain, answer_after="####") == {}


def test_a_source_without_end_is_refused_unless_its_size_is_given(
    plain: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MOST_WITHOUT_SIZE", 100)
    progress = Progress()
    config = DataConfig(source=f"{__name__}:endless")
    with pytest.raises(DataError, match=r"endless has yielded 100 records and goes on; .*; set data\.size"):
        load_prompts(config, plain, max_prompt_tokens=50, progress=progress)
    assert (progress.read, progress.ready) == (100, 0), "nothing was made of its records"
    assert len(load(f"{__name__}:endless", plain, size=200).prompts) == 200
    assert len(load(f"{__name__}:generate", plain, args={"count": 100}).prompts) == 100


def test_a_source_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, plain: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_LOOK_EVERY", 3)
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert len(load(file, plain).prompts) == 6
    monkeypatch.setattr(sources, "_memory_is_short", lambda: True)
    message = r"a\.jsonl does not fit into memory, which is short after 3 records; set data\.size"
    with pytest.raises(DataError, match=message):
        load(file, plain)


def test_many_records_keep_their_order_and_are_counted(tmp_path: Path, plain: PolicyTokenizer) -> None:
    rows = [{"prompt": f"{i}", "answer": f"{i}"} for i in range(1300)]
    progress = Progress()
    config = DataConfig(source=str(write_jsonl(tmp_path / "a.jsonl", rows)))
    prompts = load_prompts(config, plain, max_prompt_tokens=50, progress=progress).prompts
    assert [p.text for p in prompts] == [p.answer for p in prompts] == [row["prompt"] for row in rows]
    assert all(np.array_equal(p.token_ids, plain.encode([p.text], add_special_tokens=True)[0]) for p in prompts)
    assert (progress.read, progress.ready) == (1300, 1300)


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path, plain: PolicyTokenizer) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(DataError, match="line 1: not valid JSON"):
        load(tmp_path / "a.jsonl", plain)


def test_missing_empty_and_unknown_sources_are_refused(tmp_path: Path, plain: PolicyTokenizer) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "dir").mkdir()
    (tmp_path / "x.txt").touch()
    (tmp_path / "broken.parquet").write_bytes(b"nonsense")
    for source, message in [
        (tmp_path / "none.jsonl", "does not exist"),
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "empty.jsonl", "holds no usable prompt: there are no records"),
        (tmp_path / "dir", "holds no saved dataset"),
        (tmp_path / "x.txt", r"is neither a directory nor a file of a known format \(.jsonl, .json, .csv"),
        (tmp_path / "broken.parquet", "cannot be read as parquet"),
        ("reasoning_gym:leg_count", "did you mean leg_counting"),
        ("no.such.module:f", "module 'no.such.module' does not import"),
        (f"{__name__}:nothing", "has no 'nothing'"),
        (f"{__name__}:ROWS", "is not a function but list"),
        (f"{__name__}:broken", r"failed after 1 record \(KeyError: 'oops'\)"),
    ]:
        with pytest.raises(DataError, match=message):
            load(source, plain)
    with pytest.raises(ConfigError, match=r"data\.source is not set"):
        load("", plain)
    with pytest.raises(DataError, match="refused"):
        load("reasoning_gym:leg_counting", plain, args={"no_such_argument": 1})


def test_overlong_prompts_are_dropped_and_counted_or_refused(tmp_path: Path, plain: PolicyTokenizer) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], {"prompt": "x" * 20, "answer": ""}])
    kept = load(file, plain, limit=19)
    assert len(kept.prompts) == 1 and kept.dropped_overlong == 1
    assert load(file, plain, limit=20).dropped_overlong == 0
    with pytest.raises(DataError, match=r"line 2: 20 tokens, and at most 19"):
        load(file, plain, limit=19, overlong="error")
    with pytest.raises(DataError, match=r"2 prompts over 3 tokens, and no other"):
        load(file, plain, limit=3)


def test_chat_rendering_adds_the_system_prompt_and_takes_messages(tmp_path: Path, chat: PolicyTokenizer) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": "2"}, {"prompt": turns, "answer": "4"}])
    texts = [p.text for p in load(file, chat, system_prompt="add").prompts]
    assert texts == ["s=add\nu=1+1\na=", "s=add\nu=1\na=2\nu=3\na="]
    assert [p.text for p in load(write_jsonl(tmp_path / "b.jsonl", ROWS[:1]), chat, chat_template=False).prompts] == [
        "0+1=?"
    ]


def test_a_system_prompt_without_a_template_is_refused(tmp_path: Path, plain: PolicyTokenizer) -> None:
    with pytest.raises(ConfigError, match="system_prompt is set, but prompts are rendered as plain text"):
        load(write_jsonl(tmp_path / "a.jsonl", ROWS), plain, system_prompt="add")


def told(source: object, tokenizer: PolicyTokenizer, **config: Any) -> dict[str, dict[str, Any]]:
    """What loading warns of: event → its fields."""
    with capture_logs() as logs:
        load(source, tokenizer, **config)
    return {str(entry["event"]): dict(entry) for entry in logs if entry["log_level"] == "warning"}


def test_answers_that_are_null_are_counted_and_told(tmp_path: Path, plain: PolicyTokenizer) -> None:
    rows = [{"prompt": f"{i}", "answer": None if i % 3 else str(i)} for i in range(7)]
    (warning,) = told(write_jsonl(tmp_path / "a.jsonl", rows), plain).values()
    assert "no answer: it is null" in warning["event"] and warning["count"] == 4
    assert warning["first"] == f"{tmp_path}/a.jsonl line 2"
    assert told(write_jsonl(tmp_path / "b.jsonl", ROWS), plain) == {}


def test_empty_answers_are_counted_and_told(tmp_path: Path, plain: PolicyTokenizer) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n1,1\n2,\n3,\n")
    (warning,) = told(tmp_path / "a.csv", plain).values()
    assert (warning["event"], warning["count"], warning["first"]) == (
        "prompts have an empty answer",
        2,
        f"{tmp_path}/a.csv line 3",
    )


def test_a_constant_answer_is_told(tmp_path: Path, plain: PolicyTokenizer) -> None:
    rows = [row | {"answer": "4"} for row in ROWS]
    (warning,) = told(write_jsonl(tmp_path / "a.jsonl", rows), plain).values()
    assert warning["event"] == "all answers are the same" and (warning["count"], warning["example"]) == (6, "4")
    assert told(write_jsonl(tmp_path / "b.jsonl", rows[:1]), plain) == {}
    assert told(tmp_path / "a.jsonl", plain, answer_key=None) == {}


def test_duplicates_are_counted_and_told_of_what_is_not_generated(tmp_path: Path, plain: PolicyTokenizer) -> None:
    (warning,) = told(write_jsonl(tmp_path / "a.jsonl", [*ROWS, ROWS[2], ROWS[2]]), plain).values()
    assert warning["event"] == "prompts occur more than once"
    assert (warning["count"], warning["first"]) == (2, "a.jsonl:7")
    assert told(f"{__name__}:repeating", plain) == {}


def test_an_answer_that_is_an_object_is_told_with_the_path_into_it(tmp_path: Path, plain: PolicyTokenizer) -> None:
    rows = [{"prompt": f"{i}", "answer": {"ground_truth": i}} for i in range(3)]
    (warning,) = told(write_jsonl(tmp_path / "a.jsonl", rows), plain).values()
    assert "objects or lists" in warning["event"] and warning["example"] == "answer.ground_truth"


def test_what_is_found_while_rendering_is_told_once_with_its_count(tmp_path: Path, chat: PolicyTokenizer) -> None:
    rows = [{"prompt": f"{i}<|end|>", "answer": str(i)} for i in range(3)]
    (warning,) = told(write_jsonl(tmp_path / "a.jsonl", rows), chat).values()
    assert (warning["count"], warning["example"], warning["source"]) == (3, "<|end|>", f"{tmp_path}/a.jsonl")


def test_bos_is_added_to_plain_text_only(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer.load(write_policy(tmp_path, bos=True, chat_template="<bos>" + CHAT_TEMPLATE))
    file = write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    for chat_template in (True, False):
        (prompt,) = load(file, tokenizer, chat_template=chat_template).prompts
        assert list(prompt.token_ids[:2]).count(1) == 1
