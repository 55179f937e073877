"""What a chat becomes in the styles of well-known templates, and what is refused or told on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from asyncrl.config.sections.data import DataConfig
from asyncrl.data.fields import Record
from asyncrl.data.rendering.findings import Findings
from asyncrl.data.rendering.renderer import PromptRenderer
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import ConfigError, DataError
from tests.tiny_policy import ALTERNATING, CHATML, LLAMA, QWEN_THINKING, write_policy

USER = {"role": "user", "content": "1+1"}
SYSTEM = {"role": "system", "content": "add"}
CONTROL = ("<|im_start|>", "<|im_end|>", "<think>")
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN_THINKING, "alternating": ALTERNATING, "plain": None}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PolicyTokenizer]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: PolicyTokenizer.load(write_policy(root / name, chat_template=template, special=CONTROL))
        for name, template in TEMPLATES.items()
    }


def render(
    tokenizer: PolicyTokenizer, prompt: Any, findings: Findings | None = None, extra: Any = (), **config: Any
) -> str:
    renderer = PromptRenderer(DataConfig(source="a.jsonl", **config), tokenizer, findings or Findings(), "data")
    return renderer(Record("a.jsonl:7", "data/a.jsonl line 7", {"prompt": prompt} | dict(extra)))


def told(tokenizer: PolicyTokenizer, prompt: Any, extra: Any = (), **config: Any) -> list[dict[str, Any]]:
    """The warnings of a source that holds `prompt` alone."""
    findings = Findings()
    render(tokenizer, prompt, findings, extra, **config)
    with capture_logs() as logs:
        findings.tell("a.jsonl")
    assert all(entry["log_level"] == "warning" and entry["first"] == "data/a.jsonl line 7" for entry in logs)
    return [dict(entry) for entry in logs]


@pytest.mark.parametrize(
    ("style", "begun", "end"),
    [
        ("chatml", "<think>", "<|im_end|>\n<|im_start|>assistant\n<think>"),
        ("chatml", " The answer: ", "<|im_start|>assistant\n The answer: "),
        ("chatml", "", "<|im_start|>assistant\n"),
        ("llama", "Sure, ", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nSure, "),
        ("qwen", "<think>\nLet", "<|im_end|>\n<|im_start|>assistant\n<think>\nLet"),
        ("alternating", "<think>\nLet", "[user] 1+1\n<think>\nLet"),
        ("alternating", "<thin", "[user] 1+1\n<think>\n<thin"),
    ],
)
def test_the_assistants_last_message_is_continued(
    tokenizers: dict[str, PolicyTokenizer], style: str, begun: str, end: str
) -> None:
    text = render(tokenizers[style], [USER, {"role": "assistant", "content": begun}])
    assert text.endswith(end) and text.count("assistant") <= 1
    assert text.count("<think>") <= 1


def test_a_last_message_that_is_more_than_text_cannot_be_continued(tokenizers: dict[str, PolicyTokenizer]) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    with pytest.raises(DataError, match=r"line 7: .*message 2 is the assistant's and the last one.*found: tool_calls"):
        render(tokenizers["qwen"], [USER, call])
    with pytest.raises(DataError, match="its only message is the assistant's"):
        render(tokenizers["qwen"], [{"role": "assistant", "content": "Once"}])


def test_parts_of_text_are_joined_and_a_null_beside_tool_calls_is_empty(tokenizers: dict[str, PolicyTokenizer]) -> None:
    parts = [{"type": "text", "text": "1+"}, {"text": "1", "image": None}, "=?"]
    assert "user\n1+1=?<|im_end|>" in render(tokenizers["chatml"], [USER | {"content": parts}])
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    chat = [USER, call, {"role": "tool", "content": "2"}]
    assert "assistant\n<tool_call>add</tool_call>" in render(tokenizers["qwen"], chat)
    del call["content"]
    assert "<tool_call>add</tool_call>" in render(tokenizers["qwen"], chat)


def test_fields_that_are_null_are_left_out(tokenizers: dict[str, PolicyTokenizer]) -> None:
    rows = [USER | {"tool_calls": None}, {"role": "assistant", "content": "2", "tool_calls": None}, USER]
    assert "2<|im_end|>" in render(tokenizers["qwen"], rows)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER | {"content": None}], "the `content` of message 1 is null, not text or a list of text parts"),
        ([SYSTEM, USER | {"content": 3}], "the `content` of message 2 is int, not text or a list of text parts"),
        ([USER | {"content": {"text": "x"}}], "the `content` of message 1 is dict"),
        ([USER | {"content": [3]}], "message 1 has a part that is int, not text"),
        ([USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "message 1 holds images, and only"),
        ([USER | {"content": [{"type": "input_audio"}]}], "message 1 holds audios, and only text can be trained on"),
        ([USER | {"content": [{"type": "file"}]}], "message 1 has a part of type 'file' that is no text"),
        ([USER | {"tool_calls": [3]}], "message 1 has a tool call without the name of a function"),
        ([USER | {"role": None}], "the `role` of message 1 is null, not a string"),
    ],
)
def test_a_message_that_is_no_text_is_one_error_with_file_line_and_number(
    tokenizers: dict[str, PolicyTokenizer], messages: Any, message: str
) -> None:
    for style in ("chatml", "qwen", "plain"):
        with pytest.raises(DataError, match=r'^data: data/a\.jsonl line 7: field "prompt"') as error:
            render(tokenizers[style], messages)
        assert message in str(error.value)


def test_a_template_that_raises_is_one_error_with_file_line_and_number(tokenizers: dict[str, PolicyTokenizer]) -> None:
    with pytest.raises(DataError, match=r"line 7: .* at message 2, .*refuses.*TemplateError: roles must alternate"):
        render(tokenizers["alternating"], [USER, USER, USER])


def test_a_template_that_breaks_is_one_error_with_file_line_and_number(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content + m.name }}{% endfor %}"
    tokenizer = PolicyTokenizer.load(write_policy(tmp_path, chat_template=template))
    with pytest.raises(
        DataError, match=r"line 7: .* at message 2, the chat template refuses .*\((Type|Undefined)Error"
    ):
        render(tokenizer, [USER | {"name": "x"}, USER, USER | {"name": "x"}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role"]), inner),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "human"]) | JSON, "content": st.text(max_size=5) | JSON},
    optional={"tool_calls": JSON, "name": JSON, "reasoning_content": JSON},
)


@given(messages=st.lists(MESSAGE, max_size=3) | JSON, style=st.sampled_from(sorted(TEMPLATES)))
def test_whatever_a_prompt_holds_it_becomes_text_or_one_error_with_file_and_line(
    tokenizers: dict[str, PolicyTokenizer], messages: Any, style: str
) -> None:
    try:
        assert isinstance(render(tokenizers[style], messages), str)
    except DataError as error:
        assert str(error).startswith('data: data/a.jsonl line 7: field "prompt" ') and len(str(error)) < 500


def test_a_role_that_the_template_leaves_out_is_refused(tokenizers: dict[str, PolicyTokenizer]) -> None:
    with pytest.raises(DataError, match='has message 2 with the role "human": the chat template leaves it out'):
        render(tokenizers["qwen"], [SYSTEM, USER | {"role": "human"}])
    with pytest.raises(DataError, match='message 1 with the role "human"'):
        render(tokenizers["qwen"], [USER | {"role": "human"}], system_prompt="add")


def test_a_role_that_the_template_does_not_name_is_told(tokenizers: dict[str, PolicyTokenizer]) -> None:
    (warning,) = told(tokenizers["chatml"], [USER | {"role": "human"}])
    assert "a role that the chat template does not name" in warning["event"] and warning["example"] == "human"
    assert told(tokenizers["chatml"], [SYSTEM, USER]) == []


def test_tool_calls_that_the_template_leaves_out_are_refused(tokenizers: dict[str, PolicyTokenizer]) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sum_up"}}]}
    with pytest.raises(DataError, match="calls the tool 'sum_up' in message 2: the chat template leaves it out"):
        render(tokenizers["chatml"], [USER, call, USER])


def test_media_beside_the_text_are_told(tokenizers: dict[str, PolicyTokenizer]) -> None:
    (warning,) = told(tokenizers["plain"], "1+1", extra={"images": ["a.png"]})
    assert "only text is trained on" in warning["event"] and warning["example"] == "images"
    for style, prompt in (("plain", "<image> 1+1"), ("chatml", [USER | {"content": "<image>\n1+1"}])):
        (warning,) = told(tokenizers[style], prompt)
        assert "placeholder" in warning["event"] and warning["example"] == "<image>"
    assert told(tokenizers["plain"], "1+1", extra={"images": None, "image": []}) == []


def test_tools_beside_the_messages_are_told(tokenizers: dict[str, PolicyTokenizer]) -> None:
    extra = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    (warning,) = told(tokenizers["qwen"], [USER], extra=extra)
    assert "records have tools, which are not rendered" in warning["event"]
    assert told(tokenizers["plain"], "1+1", extra=extra) == [] == told(tokenizers["qwen"], [USER], extra={"tools": []})


@pytest.mark.parametrize("text", ['[{"role": "user", "content": "x"}]', " [ {'content': 'x', 'role': 'user'}]"])
def test_a_prompt_that_is_json_inside_a_string_is_refused(tokenizers: dict[str, PolicyTokenizer], text: str) -> None:
    for style in ("plain", "chatml"):
        with pytest.raises(DataError, match=r"line 7: .* is a string that holds chat messages as JSON"):
            render(tokenizers[style], text)


def test_a_system_message_of_the_record_stands_alone_and_is_told(tokenizers: dict[str, PolicyTokenizer]) -> None:
    assert "1+2" not in render(tokenizers["chatml"], [SYSTEM, USER], system_prompt="1+2")
    (warning,) = told(tokenizers["chatml"], [SYSTEM, USER], system_prompt="1+2")
    assert "data.system_prompt is not added to them" in warning["event"]
    assert told(tokenizers["chatml"], [USER], system_prompt="1+2") == []


def test_a_system_prompt_that_the_template_does_not_render_is_refused(tokenizers: dict[str, PolicyTokenizer]) -> None:
    with pytest.raises(ConfigError, match=r"data\.system_prompt: the chat template refuses .*roles must alternate"):
        render(tokenizers["alternating"], [USER], system_prompt="add")


def test_a_control_token_in_a_users_text_is_told_and_refused_by_setting(
    tokenizers: dict[str, PolicyTokenizer],
) -> None:
    text = "1<|im_end|>"
    for style, prompt in (("chatml", text), ("chatml", [USER | {"content": text}]), ("plain", text)):
        (warning,) = told(tokenizers[style], prompt)
        assert "becomes a control token" in warning["event"] and warning["example"] == "<|im_end|>"
        assert told(tokenizers[style], prompt, control_tokens="allow") == []
        with pytest.raises(DataError, match=r"line 7: field \"prompt\" holds '<\|im_end\|>', which would become"):
            render(tokenizers[style], prompt, control_tokens="error")
    assert text in render(tokenizers["plain"], text), "it stays as it is"


def test_a_control_token_that_begins_the_answer_or_plain_text_is_no_finding(
    tokenizers: dict[str, PolicyTokenizer],
) -> None:
    begun = [USER, {"role": "assistant", "content": "<think>"}]
    assert told(tokenizers["chatml"], begun) == [] == told(tokenizers["plain"], "<bos>1+1")


def test_arguments_reach_the_chat_template(tokenizers: dict[str, PolicyTokenizer]) -> None:
    end = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render(tokenizers["qwen"], [USER], chat_template_args={"enable_thinking": False}).endswith(end)
    assert render(tokenizers["qwen"], "1", chat_template_args={"enable_thinking": False}).endswith(end)
    assert not render(tokenizers["qwen"], [USER], chat_template_args={"enable_thinking": True}).endswith(end)


@pytest.mark.parametrize(
    ("style", "name", "message"),
    [
        ("qwen", "enable_thinkin", r"does not read it; did you mean enable_thinking\?"),
        ("chatml", "enable_thinking", r"chat_template_args\.enable_thinking has no effect"),
        ("chatml", "messages", r"chat_template_args\.messages is no argument of a chat template"),
        ("chatml", "tokenize", r"chat_template_args\.tokenize is no argument of a chat template"),
        ("plain", "enable_thinking", r"chat_template_args is set, but prompts are rendered as plain text"),
    ],
)
def test_an_argument_without_effect_is_refused(
    tokenizers: dict[str, PolicyTokenizer], style: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        render(tokenizers[style], "1", chat_template_args={name: False})
