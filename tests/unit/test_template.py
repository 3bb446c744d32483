"""Chat templates render and encode as transformers' own tokenizer does it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from frontend.request import Chat
from frontend.template import ChatTemplate, load_template
from frontend.tokenizer import TextTokenizer
from tests.service.frontends import TEMPLATE, write_tokenizer
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest, Unsupported

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "héllo\n"},
    {"role": "assistant", "content": "The sea is"},
]
TRICKY = """{{ eos_token }}{% for m in messages %}
  {%- if m.role == 'user' -%}
    U:{{ m.content | trim }}
  {%- else %}
    {% generation %}A:{{ m.content }}{% endgeneration %}
  {% endif %}
  {% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}{{ extra | default('none') | tojson }}"""


def chat(messages: list[dict[str, str]] = MESSAGES, **fields: object) -> Chat:
    return Chat(messages=messages, **fields)


@pytest.mark.parametrize("template", [TEMPLATE, TRICKY])
@pytest.mark.parametrize("how", ["plain", "prompted", "continued"])
def test_rendering_equals_transformers(tmp_path: Path, template: str, how: str) -> None:
    write_tokenizer(tmp_path, template=template)
    ours = TextTokenizer(tmp_path)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        eos_token="<|eos|>",
        chat_template=template,
    )
    flags = {
        "add_generation_prompt": how == "prompted",
        "continue_final_message": how == "continued",
    }
    variables = {"extra": {"b": "é", "a": [1]}}
    text = load_template(ours, None).render(chat(template_kwargs=variables, **flags))
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **flags, **variables)
    assert text == expected
    ids = theirs(expected, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == ids


def test_a_flag_file_replaces_the_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    tokenizer = TextTokenizer(tmp_path)
    assert load_template(tokenizer, str(file)).render(chat()) == "Be short.!"
    with pytest.raises(FailedPrecondition, match="--chat-template"):
        load_template(tokenizer, str(tmp_path / "absent"))


def test_a_file_beside_the_tokenizer_goes_before_its_setting(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert TextTokenizer(tmp_path).chat_template == "file"


def test_without_a_template_lines_name_the_role(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    template = load_template(TextTokenizer(tmp_path), None)
    assert template.render(chat(MESSAGES[1:])) == "User: héllo\n\nAssistant: The sea is\nAssistant:"


def test_what_a_template_refuses_is_the_callers_fault() -> None:
    template = ChatTemplate("{{ raise_exception('only users') }}", {})
    with pytest.raises(InvalidRequest, match="only users"):
        template.render(chat())
    with pytest.raises(InvalidRequest, match="exclude each other"):
        template.render(chat(continue_final_message=True, add_generation_prompt=True))
    with pytest.raises(InvalidRequest, match="cannot be set"):
        template.render(chat(template_kwargs={"messages": []}))


def test_a_setting_the_template_does_not_know_is_refused() -> None:
    known = ChatTemplate("{{ reasoning_effort }}", {})
    assert known.render(chat(template_kwargs={"reasoning_effort": "low"})) == "low"
    with pytest.raises(Unsupported, match="reasoning_effort"):
        ChatTemplate("x", {}).render(chat(template_kwargs={"reasoning_effort": "low"}))


def test_a_broken_template_is_found_at_start() -> None:
    with pytest.raises(FailedPrecondition, match="line 2"):
        ChatTemplate("\n{% if %}", {})


def test_templates_cannot_reach_the_interpreter() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(InvalidRequest):
        template.render(chat())


@pytest.mark.parametrize(
    "broken",
    [
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.absent() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' + 1 }}",
        "{{ [].pop() }}",
        "{{ '{:d}'.format('a') }}",
        "{{ {}['a'] }}{{ {}.popitem() }}",
    ],
)
def test_whatever_a_template_raises_is_the_callers_fault(broken: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot render these messages: \w+: .+"):
        ChatTemplate(broken, {}).render(chat())


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"role": "user", "content": "x"}, "of the role 'user'.*continues one of the role"),
        ({"role": "system", "content": "x"}, "of the role 'system'"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "calls tools"),
    ],
)
def test_only_a_text_of_the_assistant_can_be_continued(last: dict[str, str], words: str) -> None:
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(InvalidRequest, match=words) as caught:
        ChatTemplate(TEMPLATE, {}).render(chat([*MESSAGES, last], **flags))
    assert caught.value.param == "continue_final_message"


def test_an_empty_answer_is_continued_from_its_start() -> None:
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [MESSAGES[1], {"role": "assistant", "content": ""}]
    text = ChatTemplate(TEMPLATE, {}).render(chat(messages, **flags))
    assert text == "<|user|>héllo\n<|assistant|>"
