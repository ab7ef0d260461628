"""Chat templates: what they may use, how they fail, and where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radix_runtime.errors import ConfigError, RequestError
from radix_runtime.text.chat_template import ChatTemplate
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.tiny_tokenizers import byte_level

USER = [{"role": "user", "content": "x"}]


def render(source: str, messages: Any = USER, **kwargs: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages, add_generation_prompt=True, **kwargs)


def test_template_features() -> None:
    loop = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}ok"
    assert render(loop) == "ok"
    assert render("{{ bos_token }}{{ {'a': '<é>'} | tojson }}") == '<s>{"a": "<é>"}'
    assert render("{% if tools %}no{% endif %}{{ tools is none }}") == "True"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "x"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% if enable_thinking %}t{% endif %}", enable_thinking=True) == "t"
    template = ChatTemplate("{{ enable_thinking }}{% set y = 1 %}{{ y }}", {})
    assert template.variables(with_tools=True) == {"enable_thinking"}


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('only users') }}", "{{ ''.__class__.__mro__ }}",
     "{{ messages.append(1) }}", "{{ messages[0].content.nope.nope }}", "{{ 1 / 0 }}",
     "{{ messages + 1 }}", "{{ cycler.__init__.__globals__ }}"],
)  # fmt: skip
def test_template_errors_are_the_requests(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "chat_template_error", "messages")
    assert len(error.message) <= 200
    assert ("only users" in error.message) == ("only users" in source)


def test_template_sources(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).chat_template is None
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(tmp_path).apply_chat_template(USER)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = tmp_path / "tokenizer_config.json"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert load_tokenizer(tmp_path).render_chat(USER) == "J"
    config.write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(tmp_path).render_chat(USER) == "D"
    assert load_tokenizer(tmp_path).render_chat(USER, tools=[]) == "T"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).render_chat(USER) == "F"
    assert load_tokenizer(tmp_path).render_chat(USER, tools=[]) == "F"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}{{ mood }}")
    template = load_tokenizer(tmp_path).chat_template
    assert template is not None and template.takes_tools
    assert template.variables(with_tools=True) == {"mood"}
    assert template.variables(with_tools=False) == frozenset()
    assert load_tokenizer(tmp_path).render_chat(USER) == "F"
    assert load_tokenizer(tmp_path).render_chat(USER, tools=[1], mood="!") == "[1]!"
    own = tmp_path / "own.jinja"
    own.write_text("O{{ bos_token }}")
    assert load_tokenizer(tmp_path, str(own)).render_chat(USER) == "O"
    own.write_text("{% if %}")
    with pytest.raises(ConfigError, match="line 1"):
        load_tokenizer(tmp_path, str(own))
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokenizer(tmp_path, str(tmp_path / "none"))
