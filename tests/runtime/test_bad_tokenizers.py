"""Tokenizers and chat templates that are broken, or belong to another model: one line that names
the file, before the server takes requests."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from radix_runtime import Engine
from radix_runtime.errors import EXIT_CONFIG, ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR
from tests.child import IMPORT_PATH

OPEN_TEMPLATE = "{{ messages }}\n{% if x %}"


@dataclass(frozen=True)
class Bad:
    """`change` spoils the file `file` of a good folder. `message`: a part of what is said."""

    name: str
    file: str
    message: str
    change: Callable[[Path], Any]


def case(name: str, file: str, message: str, change: Callable[[Path], Any]) -> Bad:
    return Bad(name=name, file=file, message=message, change=change)


def text(content: str) -> Callable[[Path], Any]:
    return lambda file: file.write_text(content)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """The JSON file with another content."""

    def apply(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return apply


def more_tokens(definition: dict[str, Any]) -> None:
    vocabulary = definition["model"]["vocab"]
    first = len(vocabulary)
    vocabulary.update({f"word{number}": first + number for number in range(2000)})


def add_token(definition: dict[str, Any]) -> None:
    token = {**definition["added_tokens"][0], "content": "<picture>", "id": 1536}
    definition["added_tokens"].append(token)


BAD = [
    case("the tokens of a larger model", "tokenizer.json", "tokens, the model 1536: they do not",
        edited(more_tokens)),
    case("a definition cut short", "tokenizer.json", "cannot load the tokenizer",
        text('{"model":')),
    case("a definition of nothing", "tokenizer.json", "cannot load the tokenizer", text("{}")),
    case("an unknown kind of model", "tokenizer.json", "cannot load the tokenizer",
        edited(lambda definition: definition["model"].update(type="Odd"))),
    case("merges of no tokens", "tokenizer.json", "cannot load the tokenizer",
        edited(lambda definition: definition["model"].update(merges=[["no", "token"]]))),
    case("settings that are no JSON", "tokenizer_config.json", "cannot read", text("[")),
    case("settings that are a list", "tokenizer_config.json", "object", text("[]")),
    case("a template that does not end", "chat_template.jinja",
        "chat template, line 2: Unexpected end of template", text(OPEN_TEMPLATE)),
    case("a template with an unknown tag", "chat_template.jinja", "chat template, line 1",
        text("{% nothing %}")),
    case("a template that is no text", "chat_template.jinja", "cannot read the chat template",
        lambda file: file.write_bytes(b"\xff\xfe\xfa")),
    case("settings with a template that does not end", "tokenizer_config.json",
        "chat template, line 2: Unexpected end of template",
        edited(lambda settings: settings.update(chat_template=OPEN_TEMPLATE))),
    case("a template for tools that does not end", "tokenizer_config.json",
        "chat template, line 2",
        edited(lambda settings: settings.update(chat_template=[
            {"name": "default", "template": "{{ messages }}"},
            {"name": "tool_use", "template": OPEN_TEMPLATE}]))),
]  # fmt: skip


def good_folder(folder: Path) -> Path:
    shutil.copytree(DEMO_MODEL_DIR, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_tokenizer(bad: Bad, tmp_path: Path) -> None:
    folder = good_folder(tmp_path)
    bad.change(folder / bad.file)
    with pytest.raises(ConfigError) as caught:
        Engine(folder, device="cpu", max_total_tokens=64, num_threads=1)
    message = str(caught.value)
    print(f"| {bad.name} | {message.replace(str(tmp_path), '')} |")
    assert bad.message in message and "\n" not in message and len(message) < 500
    is_of_a_folder = bad.file == "tokenizer.json"
    assert str(folder if is_of_a_folder else folder / bad.file) in message


def test_a_template_of_the_operator(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(OPEN_TEMPLATE)
    with pytest.raises(ConfigError, match=r"mine\.jinja: chat template, line 2"):
        Engine(device="cpu", chat_template=str(file), max_total_tokens=64)


def test_a_token_beyond_the_model_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Gemma 3 of 1B: its tokenizer has one for images, its embedding has not."""
    folder = good_folder(tmp_path)
    edited(add_token)(folder / "tokenizer.json")
    with Engine(folder, device="cpu", max_total_tokens=64, num_threads=1) as engine:
        assert engine.tokenizer is not None
        assert engine.tokenizer.encode("<picture>") == [1536]
        with pytest.raises(ValueError, match="1536"):
            engine.generate("<picture>", {"max_new_tokens": 1})
        assert engine.generate("a", {"max_new_tokens": 1})["output_ids"]
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    lines = [line for line in told if "1 tokens are beyond the 1536 ids" in line]
    assert len(lines) == 1 and lines[0].endswith("<picture>")


def test_the_server_ends_with_the_code_of_a_wrong_configuration(tmp_path: Path) -> None:
    folder = good_folder(tmp_path)
    edited(more_tokens)(folder / "tokenizer.json")
    command = [sys.executable, "-m", "radix_runtime.cli", "serve", "--model-path", str(folder)]
    done = subprocess.run(
        [*command, "--port", "0", "--device", "cpu", "--max-total-tokens", "64"],
        env={"PYTHONPATH": IMPORT_PATH, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == EXIT_CONFIG
    assert f"{folder}: the tokenizer has" in done.stderr and "Traceback" not in done.stderr
