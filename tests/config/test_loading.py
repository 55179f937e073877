"""Files and options become one configuration, each value with its origin, each mistake with its fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.problems import InvalidConfigError
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.config.reading.loading import load_config, parse_command_line
from asyncrl.config.reading.schema import fields


def value_of(loaded: LoadedConfig, key: str) -> object:
    value: object = loaded.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def test_later_files_win_over_earlier_ones_and_options_over_files(load):
    loaded = load("--train.seed", "7", toml="[train]\nlr = 0.5\nseed = 3\n[model]\ndtype = 'float32'\n")
    assert (loaded.config.train.lr, loaded.config.train.seed, loaded.config.model.dtype) == (0.5, 7, "float32")
    assert loaded.config.model.path == Path("model")


def test_every_value_knows_where_it_came_from(load):
    loaded = load("--train.seed", "7", "--data.args.n", "2", toml="[train]\nlr = 0.5\nseed = 3\n[data.args]\nm = 1\n")
    assert loaded.sources["train.seed"] == "--train.seed"
    assert loaded.sources["train.lr"] == "more.toml"
    assert loaded.sources["model.path"] == "recipe.toml"
    assert loaded.sources["train.grad_clip"] == "default"
    assert loaded.sources["data.args.m"] == "more.toml"
    assert loaded.sources["data.args.n"] == "--data.args.n"
    assert loaded.sources["eval.data"] == "default"
    off = ("eval.data.", "eval.fleet.", "models.")
    plain = {spec.key for spec in fields().values() if spec.kind in ("scalar", "list") and not spec.key.startswith(off)}
    assert plain <= set(loaded.sources)


def test_a_section_that_is_none_by_default_keeps_the_origin_of_each_of_its_values(load):
    loaded = load("--eval.data.size", "5", toml="[eval.data]\nsource = 'train.jsonl'\n")
    assert loaded.sources["eval.data.source"] == "more.toml"
    assert loaded.sources["eval.data.size"] == "--eval.data.size"
    assert loaded.sources["eval.data.seed"] == "default"


@pytest.mark.parametrize(
    ("argv", "key", "expected"),
    [
        (["--train.lr", "1e-3"], "train.lr", 1e-3),
        (["--train.lr=1e-3"], "train.lr", 1e-3),
        (["--rollout.top-k", "-1"], "rollout.top_k", -1),
        (["--rollout.samples_per_prompt", "4"], "rollout.samples_per_prompt", 4),
        (["--rollout.samples-per-prompt", "4"], "rollout.samples_per_prompt", 4),
        (["--rollout.ignore-eos"], "rollout.ignore_eos", True),
        (["--run.export", "false"], "run.export", False),
        (["--data.chat-template", "false"], "data.chat_template", False),
        (["--data.chat-template", "auto"], "data.chat_template", "auto"),
        (["--data.answer-key", "none"], "data.answer_key", None),
        (["--rollout.stop", "a,b", "</s>"], "rollout.stop", ("a,b", "</s>")),
        (["--rollout.stop", '["x", "y"]'], "rollout.stop", ("x", "y")),
        (["--rollout.stop=--"], "rollout.stop", ("--",)),
        (["--rollout.stop=@"], "rollout.stop", ("@",)),
        (["--rollout.stop", "[]"], "rollout.stop", ()),
        (["--engine.cpus", "0"], "engine.cpus", (0,)),
        (["--engine.cpus", "none"], "engine.cpus", None),
        (["--data.args", "{a = 1, b = [true]}"], "data.args", {"a": 1, "b": [True]}),
        (["--data.args", '{"a": {"b": 1.5}}'], "data.args", {"a": {"b": 1.5}}),
        (["--data.args.a", "2"], "data.args", {"a": 2}),
        (["--data.args.a", "two words"], "data.args", {"a": "two words"}),
        (["--data.args.a", "3 # not a comment"], "data.args", {"a": "3 # not a comment"}),
        (["--data.args.a", "2024-01-01"], "data.args", {"a": "2024-01-01"}),
        (["--data.args.a", "none"], "data.args", {"a": "none"}),
        (["--data.args.a.b", "1", "--data.args.a.c", "2"], "data.args", {"a": {"b": 1, "c": 2}}),
        (["--data.args", "{a = {b = 1}}", "--data.args.a.c", "2"], "data.args", {"a": {"b": 1, "c": 2}}),
        (["--data.args.a", "1", "--data.args", "{}"], "data.args", {}),
        (["--engine.server-args.chunked-prefill-size", "2048"], "engine.server_args", {"chunked_prefill_size": 2048}),
        (["--engine.server-args.disable-radix-cache"], "engine.server_args", {"disable_radix_cache": True}),
        (["--train.lr", "1", "--train.lr", "2"], "train.lr", 2.0),
    ],
)
def test_options_spell_values_of_every_kind(load, argv, key, expected):
    loaded = load(*argv)
    assert value_of(loaded, key) == expected
    assert type(value_of(loaded, key)) is type(expected)


@pytest.mark.parametrize("argv", [["@", "recipe.toml"], ["@recipe.toml"], ["--train.lr", "1", "@recipe.toml"]])
def test_files_may_be_named_anywhere_and_in_both_spellings(recipe, argv):
    assert parse_command_line(argv).files == ("recipe.toml",)


def test_tables_of_two_files_are_merged_and_a_literal_option_replaces_them(load):
    toml = "[data.args]\na = 1\nb = 2\n"
    assert load("--data.args.b", "3", toml=toml).config.data.args == {"a": 1, "b": 3}
    assert load("--data.args", "{c = 4}", toml=toml).config.data.args == {"c": 4}


def test_a_section_can_be_unset_and_set_again(load):
    toml = "[eval.data]\nsource = 'train.jsonl'\nsize = 3\n"
    assert load("--eval.data", "none", toml=toml).config.eval.data is None
    again = load("--eval.data", "none", "--eval.data.source", "train.jsonl", toml=toml)
    assert again.config.eval.data is not None
    assert again.config.eval.data.size is None


def test_an_empty_section_in_a_later_file_changes_nothing(load):
    assert load("--train.lr", "1", toml="[train]\n[rollout]\n").config.train.lr == 1


def test_an_unknown_key_in_a_file_is_refused_with_the_nearest_one(load):
    with pytest.raises(InvalidConfigError) as caught:
        load(toml="[train]\nlrr = 1\n")
    assert str(caught.value) == "train.lrr: unknown key in more.toml; did you mean train.lr?"
    assert caught.value.exit_code != 0


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--train.lrr", "--train.lr"),
        ("--trian.lr", "--train.lr"),
        ("--lr", "--train.lr or --warmup.lr"),
        ("--train.temperature", "--eval.temperature or --rollout.temperature"),
        ("--rollout.max-tokens", "--rollout.max-new-tokens"),
        ("--engine.chunked-prefill-size", "--engine.server-args.chunked-prefill-size"),
        ("--eval.data.soruce", "--eval.data.source"),
        ("--eval.data.sz", "--eval.data.size"),
        ("--train.learning-rate", "--train.lr"),
        ("--train.ppo-epochs", "--train.batch-epochs"),
        ("--rollout.n", "--rollout.samples-per-prompt"),
        ("--train.batch-size", "--rollout.prompts-per-step"),
        ("--training.seed", "--train.seed"),
        ("--engine.tp-size", "--engine.tensor-parallel or --train.tensor-parallel"),
        ("--engine.dtype", "--model.dtype"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(refused, option, meant):
    assert refused(option, "1")[option] == f"unknown option; did you mean {meant}?"


@pytest.mark.parametrize("option", ["--qqqqqqq", "--train.quantiser", "--run.color", "--engine.count"])
def test_a_key_like_no_other_gets_no_misleading_suggestion(refused, option):
    assert refused(option, "1")[option] == "unknown option"


def test_an_unknown_section_is_refused_with_the_nearest_one_and_its_keys_are_not_missed(load):
    Path("recipe.toml").write_text('[modell]\npath = "model"\n[dataset]\nsource = "train.jsonl"\n')
    with pytest.raises(InvalidConfigError) as caught:
        load()
    assert {problem.key: problem.text for problem in caught.value.problems} == {
        "modell": "unknown key in recipe.toml; did you mean model?",
        "dataset": "unknown key in recipe.toml; did you mean data?",
    }


def test_a_dotted_key_in_quotes_is_explained(refused):
    text = refused(toml='"data.source" = "x.jsonl"\n')["data.source"]
    assert text == '"data.source" in quotes is one key with a dot in it; remove the quotes'


def test_all_problems_are_listed_together_one_line_each(load):
    with pytest.raises(InvalidConfigError) as caught:
        load("--rollout.top-p", "0.5", "--nope", toml="[train]\nlrr = 1\nseed = 'x'\nlr = -1\nnum_steps = true\n")
    header, *lines = str(caught.value).splitlines()
    assert header == "6 problems in the configuration:"
    keys = {"train.lrr", "--nope", "train.num_steps", "train.seed", "train.lr", "rollout.top_p"}
    assert {line.split(":")[0].strip() for line in lines} == keys
    assert all("(from more.toml)" in line for line in lines if "not allowed" in line)
    assert "(from --rollout.top-p)" in lines[-1]


@pytest.mark.parametrize(
    ("toml", "key", "text"),
    [
        ("[train]\nlr = 'fast'", "train.lr", "'fast' is not allowed; expected number, at least 0"),
        ("[train]\nlr = true", "train.lr", "true is not allowed; expected number, at least 0"),
        ("[train]\nlr = nan", "train.lr", "nan is not allowed; expected number, at least 0"),
        ("[train]\nlr = inf", "train.lr", "inf is not allowed; expected number, at least 0"),
        ("[train]\nseed = 1.5", "train.seed", "1.5 is not allowed; expected whole number"),
        (
            "[engine]\nnum_engines = 1000000000",
            "engine.num_engines",
            "1000000000 is not allowed; expected whole number, at least 1, at most 4096, or none",
        ),
        ("[train]\nseed = {a = 1}", "train.seed", "{'a': 1} is not allowed; expected whole number"),
        ("[train]\nbackend = 'fsdp'", "train.backend", "'fsdp' is not allowed; expected \"megatron\""),
        ("train = 3", "train", "3 is not allowed; expected a table"),
        ("train = 'none'", "train", "'none' is not allowed; expected a table"),
        ("[eval]\ndata = 3", "eval.data", "3 is not allowed; expected a table, or none"),
        ("[data]\noverlong = ''", "data.overlong", '\'\' is not allowed; expected "drop" or "error"'),
        ("[data]\nchat_template = 'x'", "data.chat_template", "'x' is not allowed; expected true or false or \"auto\""),
        ("[engine]\ncpus = ['a']", "engine.cpus", "['a'] is not allowed; expected a list of whole numbers, or none"),
        ("[rollout]\nstop = 'x'", "rollout.stop", "'x' is not allowed; expected a list of texts"),
        (
            "[reward.args]\nx = [1]",
            "reward.args.x",
            "[1] is not allowed; expected text or number or whole number or true or false",
        ),
        ("[data]\nargs = 3", "data.args", "3 is not allowed; expected a table"),
        (
            "[router]\nport = 70000",
            "router.port",
            "70000 is not allowed; expected whole number, at least 1, at most 65535, or none",
        ),
    ],
)
def test_a_value_of_the_wrong_kind_names_key_value_and_what_is_expected(refused, toml, key, text):
    assert refused(toml=toml) == {key: text}


@pytest.mark.parametrize(
    ("argv", "key", "text"),
    [
        (["--train.lr"], "train.lr", "needs a value: number, at least 0"),
        (["--train.lr", "1", "2"], "train.lr", "takes one value, but 2 follow (1 2); quote what belongs together"),
        (["--data.args", "3"], "data.args", "'3' is not a table; write {name = value}, or --data.args.NAME VALUE"),
        (["--data.args.a", "1", "2"], "data.args.a", "takes one value, but 2 follow (1 2); write a list as [a, b]"),
        (["--data.args", '{"a": null}'], "data.args", "null has no place in a configuration; leave the key out"),
        (["--data.args.a", "[1"], None, None),
        (["--engine.cpus", "x"], "engine.cpus", "['x'] is not allowed; expected a list of whole numbers, or none"),
        (["--train", "{lr = 1}"], "--train", "is a section; write --train.KEY VALUE"),
        (["other.toml"], "other.toml", "unexpected argument; did you mean @ other.toml?"),
        (["-lr", "3"], "-lr", "unexpected argument; options are written --section.key value"),
        (["@"], "@", "needs a file: @ recipe.toml"),
        (["@", "--train.lr", "1"], "@", "needs a file: @ recipe.toml"),
        (["--model.path", "\udcff"], "'\\udcff'", "is not valid UTF-8"),
    ],
)
def test_a_malformed_command_line_is_refused(load, refused, argv, key, text):
    if key is None:
        assert load(*argv).config.data.args == {"a": "[1"}
    else:
        assert refused(*argv)[key] == text


def test_a_missing_or_broken_file_is_named_without_complaints_about_what_it_would_have_set(recipe):
    Path("broken.toml").write_text("[train\n")
    Path("latin.toml").write_bytes(b"[model]\npath = '\xe9'\n")
    complaints = {
        "gone.toml": "No such file",
        "broken.toml": "not valid TOML",
        "latin.toml": "UTF-8",
        "model": "directory",
    }
    for name, text in complaints.items():
        with pytest.raises(InvalidConfigError, match=text) as caught:
            load_config(["@", name])
        assert [problem.key for problem in caught.value.problems] == [name]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("num_steps = None", '; write "none", not None'),
        ("num_steps = none  # all", '; write "none", not none'),
        ("num_steps = null", '; write "none", not null'),
        ("flag = True", "; write true, not True"),
        ("num_steps = yes", ""),
    ],
)
def test_words_of_other_languages_are_translated(refused, line, hint):
    text = refused(toml=f"[train]\nlr = 1e-3\n{line}\nseed = 1\n")["more.toml"]
    assert text.startswith("is not valid TOML: Invalid value (at line 3") and text.endswith(f"){hint}")


def test_a_byte_order_mark_is_no_part_of_a_file(load):
    Path("recipe.toml").write_bytes(b"\xef\xbb\xbf" + Path("recipe.toml").read_bytes())
    assert load().config.model.path == Path("model")


def test_a_tilde_is_the_home_of_the_user_wherever_a_path_stands(load, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load("--run.dir", "~/runs/x", toml='[data]\nsource = "~/train.jsonl"\n').config
    assert (config.run.dir, config.data.source) == (tmp_path / "runs/x", str(tmp_path / "train.jsonl"))
    assert load("--data.answer-key", "~x").config.data.answer_key == "~x"
    assert refused("--run.dir", "")["run.dir"] == "'' is not allowed; expected path"


def test_a_misspelled_key_is_not_reported_twice_as_missing(load):
    Path("recipe.toml").write_text('[model]\npth = "model"\n[data]\nsuorce = "train.jsonl"\n')
    with pytest.raises(InvalidConfigError) as caught:
        load()
    assert {problem.key for problem in caught.value.problems} == {"model.pth", "data.suorce"}


def test_a_key_spelled_with_dashes_and_with_underscores_in_one_file_is_refused(refused):
    assert "given twice" in refused(toml="[train]\nnum-steps = 3\nnum_steps = 4\n")["train.num_steps"]


def test_secrets_do_not_appear_in_messages(load):
    with pytest.raises(InvalidConfigError) as caught:
        load(
            "--reward.args.api-key",
            '["hunter2"]',
            "--engine.server-args.log-level",
            "--engine.server-args.api-key=hunter2",
        )
    assert "hunter2" not in str(caught.value)


def test_a_blanked_out_secret_of_a_saved_configuration_must_be_given_again(refused, load):
    toml = '[data.args]\nhf_token = "<redacted>"\n'
    assert "blanked out" in refused(toml=toml)["data.args.hf_token"]
    assert load("--data.args.hf-token", "x", toml=toml).config.data.args == {"hf_token": "x"}
