"""Which parsers a model gets: by name, by alias, by its chat template; and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from radix_runtime.config import ServerArgs
from radix_runtime.errors import ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.registry import entry_points
from radix_runtime.text.answer_format import AnswerFormat, check_format_names, find_format
from radix_runtime.text.reasoning import reasoning_families
from radix_runtime.text.tokenizer import ChatPrompt, load_tokenizer
from radix_runtime.text.tool_parsers import tool_parsers
from tests.runtime.tool_templates import TEMPLATES

REASONING = {
    "hermes": "qwen3", "glm45": "glm45", "minimax-m2": "minimax", "deepseekv31": "qwen3",
    "gpt-oss": "gpt-oss",
}  # fmt: skip


def found(folder: Path, template: str, **settings: str) -> AnswerFormat:
    file = folder / "template.jinja"
    file.write_text(template)
    args = ServerArgs(**settings)  # type: ignore[arg-type]
    check_format_names(args)
    return find_format(args, load_tokenizer(DEMO_MODEL_DIR, str(file)))


@pytest.mark.parametrize("family", TEMPLATES)
def test_auto_reads_the_template(tmp_path: Path, family: str) -> None:
    name = family.split()[0]
    format = found(tmp_path, TEMPLATES[family])
    assert format.tools.name == name and "the chat template has" in format.tools.why
    assert format.reasoning.name == REASONING.get(family, "none")
    assert name in format.facts()["answer_format"]


def test_no_template_and_an_unknown_one(tmp_path: Path) -> None:
    format = found(tmp_path, "{{ messages }}")
    assert (format.tools.name, format.reasoning.name) == ("none", "none")
    assert not format.has_tools and format.parser(ChatPrompt(ids=[], end=""), None) is None
    nothing = find_format(ServerArgs(), None)
    assert nothing.tools.why == "there is no chat template"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("qwen", "hermes"), ("qwen25", "hermes"), ("llama3_json", "llama3"),
        ("deepseek_v3", "deepseekv3"), ("deepseek_v31", "deepseekv31"), ("openai", "gpt-oss"),
        ("HERMES", "hermes"), ("none", "none"),
    ],
)  # fmt: skip
def test_names_of_others(tmp_path: Path, spelling: str, name: str) -> None:
    format = found(tmp_path, TEMPLATES["mistral"], tool_call_parser=spelling)
    assert format.tools == (name, "as the flag says")
    reasoning = found(tmp_path, TEMPLATES["mistral"], reasoning_parser="deepseek_r1")
    assert reasoning.reasoning.name == "deepseek-r1"


def test_every_family_has_a_template_here() -> None:
    assert set(TEMPLATES) - {"mistral 11"} == set(tool_parsers.names())
    for flag, name in (("tool_call_parser", "pythonic"), ("reasoning_parser", "hermes")):
        with pytest.raises(ConfigError, match="must be one of auto, none"):
            check_format_names(ServerArgs(**{flag: name}))  # type: ignore[arg-type]
    assert set(REASONING.values()) | {"deepseek-r1"} == set(reasoning_families)


def test_a_parser_of_another_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Entry:
        name = "mine"

        @staticmethod
        def load() -> type:
            return tool_parsers.get("hermes")

    def entries(group: str, name: str | None = None) -> list[type[Entry]]:
        is_asked = group == "radix.tool_parsers" and name in (None, "mine")
        return [Entry] if is_asked else list(entry_points(group=group, name=name or ""))

    monkeypatch.setattr("radix_runtime.registry.entry_points", entries)
    format = found(tmp_path, "{{ messages }}", tool_call_parser="mine")
    assert format.has_tools and format.tools.name == "mine"


def test_the_special_tokens_of_a_format(tmp_path: Path) -> None:
    """The demo tokenizer has <|im_end|> and no other marker; only special tokens are kept."""
    format = found(tmp_path, TEMPLATES["gpt-oss"])
    assert format.keep_special(None) == []
