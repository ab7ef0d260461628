"""`radix generate`: its input, its output, and what it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from radix_runtime.cli import main
from radix_runtime.cli.prompt_file import read_lines
from radix_runtime.errors import ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.api_stack import Stack
from tests.runtime.command import SMALL, Run
from tests.runtime.server_process import environment


def test_generate_refuses_a_flag_before_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "prompts.txt"
    empty.write_text("")
    assert main(["generate", str(empty), "--model-path", str(tmp_path), "--temperature=-1"]) == 78
    assert "temperature" in capsys.readouterr().err


def test_generate_keeps_order_and_takes_every_form(tmp_path: Path, here: Run) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "Hello", "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}},
        {"messages": [{"role": "user", "content": "What is 2 + 3?"}]},
        {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}},
    ]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    flags = ["--max-new-tokens", "4", "--temperature", "0", *SMALL]
    result = here("generate", str(source), "-o", str(target), *flags)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [r["index"] for r in records] == [0, 1, 2]
    assert [r["completion_tokens"] for r in records][::2] == [9, 1]
    assert records[2]["prompt_tokens"] == 3 and all(isinstance(r["text"], str) for r in records)


def test_generate_takes_a_prompt_from_the_command_line(here: Run) -> None:
    flags = ["--max-new-tokens", "12", "--temperature", "0", *SMALL]
    asked = here("generate", "What is 17 + 25?", "--chat", *flags)
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "17 + 25 = 42.\n", "")
    for given in (["-p", "Hello"], ["Hello there"]):
        result = here("generate", *given, *flags)
        assert result.returncode == 0 and result.stdout.count("\n") >= 1
        assert "--chat asks it as a user would" in result.stderr
    for argv, why in (
        (["Hello"], "cannot read Hello"),
        ([], "give a file, - or a prompt"),
        (["x.txt", "-p", "y"], "give a file, - or a prompt"),
    ):
        result = here("generate", *argv, *SMALL)
        assert result.returncode == 78 and why in result.stderr


@pytest.mark.parametrize(
    ("text", "count"),
    [("Hello\n\nWhat is 2 + 3?\n", 2), ('{"prompt": "x"}\n{"input_ids": [5]}', 2), ("", 0)],
)
def test_generate_reads_standard_input(
    text: str, count: int, here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    result = here("generate", "-", "--max-new-tokens", "2", *SMALL)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["index"] for record in records] == list(range(count))


def test_generate_names_the_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    for text, what in (
        ("{", "truncated"),
        ('{"promt": "x"}', "promt"),
        ('{"prompt": "x", "input_ids": [1]}', "one of"),
        ("{}", "one of"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"content": "x"}]}', r"messages\[0\].role is required"),
        ('{"messages": [{"role": "user", "content": "x", "colour": 1}]}', "unknown parameter"),
        (json.dumps({"messages": [image]}), "only parts of type text"),
        ('{"prompt": "x", "sampling_params": {"n": 2}}', "n must be 1"),
    ):
        file.write_text('{"prompt": "x"}\n\n' + text)
        with pytest.raises(ConfigError, match=f"line 3: .*{what}"):
            read_lines(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_lines(tmp_path / "absent")


def test_generate_takes_messages_as_the_chat_route_does(tmp_path: Path, here: Run) -> None:
    """Text parts, fields that answers have and requests do not need, the developer's role: the same
    prompt."""
    file = tmp_path / "in.jsonl"
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 3?"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello", "name": "Ann"},
        {
            "role": "assistant",
            "content": "Hi",
            "refusal": None,
            "annotations": [],
            "tool_calls": None,
        },
        {"role": "user", "content": parts},
    ]
    file.write_text(json.dumps({"messages": messages}))
    (line,) = read_lines(file)
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    with Stack() as stack:
        answer = httpx.post(f"{stack.url}/tokenize", json={"messages": messages}).json()
    assert line.messages is not None
    assert tokenizer.apply_chat_template(line.messages) == answer["tokens"]
    short = {"messages": messages[-1:], "sampling_params": {"max_new_tokens": 2}}
    file.write_text(json.dumps(short))
    result = here("generate", str(file), *SMALL)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["completion_tokens"] <= 2


def test_generate_names_the_bad_prompt_and_keeps_an_old_output(tmp_path: Path, here: Run) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\n{"input_ids": [99999]}')
    target.write_text("old")
    result = here("generate", str(source), "-o", str(target), *SMALL)
    assert result.returncode == 78
    assert result.stderr.startswith("radix: error: prompt 1: the id at position 0")
    assert target.read_text() == "old"


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path, here: Run) -> None:
    source = tmp_path / "in.txt"
    source.write_text("x")
    result = here("generate", str(source), "-o", str(tmp_path / "absent" / "out"), "no-such-model")
    assert result.returncode == 78
    reason = f"there is no directory {tmp_path / 'absent'}"
    assert result.stderr == f"radix: error: argument -o/--output: {reason}\n"


def test_an_interrupted_generate_keeps_what_was_complete(tmp_path: Path) -> None:
    """The first prompt, the longest, is not: those after it wait for it."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    sizes = [1500, 1, 2, 3]
    lines = [
        {"prompt": "Hello", "sampling_params": {"max_new_tokens": n, "ignore_eos": True}}
        for n in sizes
    ]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    code = (
        "import radix_runtime.cli.generate as g, sys; from radix_runtime.cli import main\n"
        "def interrupted(outputs, *_, **__):\n"
        "    for i, output in enumerate(outputs):\n"
        "        yield output\n"
        "        if i == 2: raise KeyboardInterrupt\n"
        "g.with_progress = interrupted; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "generate", str(source), "-o", str(target), *SMALL]
    result = subprocess.run(command, timeout=120, env=environment("/tmp"), check=False)
    assert result.returncode == 130
    assert [json.loads(line)["index"] for line in target.read_text().splitlines()] == [1, 2, 3]


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """JSON may hold U+2028, U+2029 and U+0085 as they are."""
    text = "a\u2028b\u2029c\x85d\x0be"
    for name, content in (
        ("in.jsonl", json.dumps({"prompt": text}, ensure_ascii=False)),
        ("in.txt", text),
    ):
        for encoding in ("utf-8", "utf-8-sig"):  # some editors begin a file with a byte order mark
            (tmp_path / name).write_text(f"{content}\r\n\n{content}", encoding=encoding, newline="")
            assert [line.prompt for line in read_lines(tmp_path / name)] == [text, text]
