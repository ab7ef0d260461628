"""The command `radix`: flags, and every command but `serve` (see test_server_process)."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path

import httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from radix_kernels import _loader
from radix_runtime import hf, ops
from radix_runtime.cli import doctor, main
from radix_runtime.cli.bench import Record, figures, make_items, read_lengths, token_range
from radix_runtime.cli.client import Client
from radix_runtime.cli.flags import Parser, add_server_flags, server_args
from radix_runtime.cli.generate import read_lines
from radix_runtime.config import ServerArgs, flag_name
from radix_runtime.errors import ConfigError, RequestError
from tests.runtime.api_stack import Stack
from tests.runtime.server_process import ROOT, Server, environment

Run = Callable[..., subprocess.CompletedProcess[str]]

SMALL = ("--max-total-tokens", "4096", "--num-threads", "1")


def radix(*argv: str, stdin: str = "", limit: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "radix_runtime.cli", *argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=limit,
        env=environment("/tmp"),
        check=False,
    )


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """As `radix`, in this process, which has loaded torch."""
    monkeypatch.setattr(
        "radix_runtime.cli.flags.setup_logging", lambda *_: None
    )  # it would keep a captured stream

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = main(argv)
        return subprocess.CompletedProcess(argv, code, *capfd.readouterr())

    return run


def parse(*argv: str) -> ServerArgs:
    parser = Parser(prog="radix serve")
    add_server_flags(parser)
    return server_args(parser.parse_args(list(argv)))


@pytest.mark.parametrize(
    ("host", "warns"), [("127.0.0.2", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_a_host_that_others_reach_wants_a_key(host: str, warns: bool) -> None:
    for flags, expected in (((), warns), (("--api-key", "k"), False)):
        result = radix("serve", "/no/such/model", "--host", host, "--port", "0", *flags)
        assert result.returncode == 78 and ("ANYBODY WHO REACHES" in result.stderr) == expected


def test_every_setting_has_a_flag_and_its_default() -> None:
    assert parse() == ServerArgs()
    parser = Parser(prog="x")
    add_server_flags(parser)
    text = parser.format_help()
    for field in fields(ServerArgs):
        assert flag_name(field.name) in text


def test_values_and_aliases() -> None:
    args = parse(
        "--model", "m", "-tp", "2", "--max-model-len", "99", "--block-size=4", "--dtype", "float32",
        "--chunked-prefill-size", "-1", "--disable-radix-cache", "--gpu-memory-utilization", "0.5",
    )  # fmt: skip
    assert args == ServerArgs(
        model_path="m", tp_size=2, context_length=99, page_size=4, dtype="float32",
        chunked_prefill_size=-1, disable_radix_cache=True, mem_fraction_static=0.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--tp-sise", "2"], "did you mean --tp-size?"),
        (["--page-siz=3"], "did you mean --page-size?"),
        (["--max-run", "3"], "unknown flag --max-run"),
        (["extra"], "extra"),
        (["--port", "x"], "--port"),
        (["--dtype", "int3"], "--dtype"),
    ],
)
def test_bad_flags_exit_with_78_and_one_line(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "model", *argv]) == 78
    out, error = capsys.readouterr()
    assert (
        error.startswith("radix: error: ")
        and text in error
        and error.count("\n") == 1
        and out == ""
    )


def test_a_mode_knows_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in (
        (["serve", "--num-prompt=3"], "did you mean --num-prompts?"),
        (["serve", "extra"], "'extra'"),
    ):
        assert main(["bench", *argv]) == 78 and text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--page-size", ["0"]),
        ("--request-timeout", ["0", "-1", "nan", "inf"]),
        ("--step-timeout", ["nan", "inf"]),
        ("--max-body-size", ["0", "-5"]),
        ("--context-length", ["1"]),  # a token of the prompt and one of the answer are the least
        ("--max-total-tokens", ["1"]),
        ("--api-key", [""]),
        ("--model-path", [""]),
        (
            "--allowed-origins",
            [
                "example.org",
                "https://a.example/",
                "https://a.example,",
                "https://A.example",
                "*,*",
                '["*"]',
                "https://*.example",
                "https://u@a.example",
                "https://a.example?x",
            ],
        ),
    ],
)
def test_values_that_cannot_work(flag: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=flag):
            parse(flag, value)


def test_generate_refuses_a_flag_before_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "prompts.txt"
    empty.write_text("")
    assert main(["generate", str(empty), "--model-path", str(tmp_path), "--temperature=-1"]) == 78
    assert "temperature" in capsys.readouterr().err


def test_help_version_and_unknown_command() -> None:
    assert re.fullmatch(r"radix \d+\.\d+\.\d+\n", radix("--version").stdout)
    overview = radix()
    assert overview.returncode == 0 and "doctor" in overview.stdout
    assert radix("sevre").returncode == 78
    result = radix("serve", "--explain-config", "--page-size", "4", "--api-key", "secret-key")
    assert "* --page-size" in result.stdout and "secret-key" not in result.stdout


def test_doctor(here: Run) -> None:
    result = here("doctor", "--ops")
    assert "torch" in result.stdout and "rmsnorm" in result.stdout
    assert "cpu cores" in result.stdout and "Traceback" not in result.stderr


def test_doctor_says_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[doctor.Problem]:
        yield doctor.Problem("a [/b] c", "pip install x[y]")
        raise ImportError("no [bold] symbol", name="radix_kernels")

    for section in ("_kernels", "_machine", "_gpu"):
        monkeypatch.setattr(doctor, section, broken)
    assert main(["doctor"]) == 78
    said = capsys.readouterr().out.splitlines()[-4:]
    first = ["problem: a [/b] c", "    remedy: pip install x[y]"]
    assert said == [
        *first,
        "problem: radix_kernels does not load: no [bold] symbol",
        "    remedy: reinstall the kernel wheel",
    ]


def test_doctor_tells_wheels_that_are_installed_over_one_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> Iterator[doctor.Problem]:
        # ops.py passes on what the kernel package says.
        monkeypatch.setattr(_loader.metadata, "distribution", lambda name: name)
        try:
            _loader._refuse_siblings()
        except ImportError as error:
            raise ConfigError(str(error)) from None
        yield doctor.Problem("not", "refused")

    for section in ("_machine", "_gpu"):
        monkeypatch.setattr(doctor, section, lambda: iter(()))
    monkeypatch.setattr(doctor, "_kernels", refused)
    assert main(["doctor"]) == 78
    what, remedy = capsys.readouterr().out.splitlines()[-2:]
    assert what.startswith("problem: radix-kernels-cpu and ") and what.endswith(
        "overwrite each other"
    )
    assert remedy.startswith("    remedy: Keep one: pip uninstall -y radix-kernels-cpu ")


def test_doctor_tells_the_portable_level(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ops.capabilities()
    for isa, told in (("avx2", False), ("portable", True)):
        monkeypatch.setattr(ops, "capabilities", lambda isa=isa: {**facts, "isa": isa})
        result = here("doctor")
        assert (f"problem: {ops.PORTABLE}" in result.stdout.splitlines()) == told
    assert result.returncode == 78


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
    tokenizer = hf.load_tokenizer(hf.DEMO_MODEL_DIR)
    with Stack() as stack:
        answer = httpx.post(f"{stack.url}/tokenize", json={"messages": messages}).json()
    assert (
        line.messages is not None
        and tokenizer.apply_chat_template(line.messages) == answer["tokens"]
    )
    file.write_text(
        json.dumps({"messages": messages[-1:], "sampling_params": {"max_new_tokens": 2}})
    )
    result = here("generate", str(file), *SMALL)
    assert result.returncode == 0 and json.loads(result.stdout)["completion_tokens"] <= 2, (
        result.stderr
    )


def test_generate_names_the_bad_prompt_and_keeps_an_old_output(tmp_path: Path, here: Run) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\n{"input_ids": [99999]}')
    target.write_text("old")
    result = here("generate", str(source), "-o", str(target), *SMALL)
    assert result.returncode == 78 and result.stderr.startswith(
        "radix: error: prompt 1: the id at position 0"
    )
    assert target.read_text() == "old"


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path, here: Run) -> None:
    source = tmp_path / "in.txt"
    source.write_text("x")
    result = here(
        "generate",
        str(source),
        "-o",
        str(tmp_path / "absent" / "out"),
        "--max-new-tokens",
        "1",
        *SMALL,
    )
    assert (
        result.returncode == 70
        and result.stderr.count("\n") == 1
        and "No such file" in result.stderr
    )


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
        "g.track = interrupted; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "generate", str(source), "-o", str(target), *SMALL]
    assert (
        subprocess.run(command, timeout=120, env=environment("/tmp"), check=False).returncode == 130
    )
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


def test_the_client_reads_answers_to_their_end_and_keeps_the_connection() -> None:
    text = "a\u2028b\u2029c\x85d"

    async def ask(url: str) -> list[str]:
        async with Client(url) as client:
            answers = []
            for _ in range(3):
                body = {"prompt": text, "echo": True, "max_tokens": 1}
                chunks = [chunk async for chunk in client.chunks("/v1/completions", body)]
                answers.append("".join(c["text"] for chunk in chunks for c in chunk["choices"]))
            with pytest.raises(RequestError, match="max_tokens"):
                await anext(client.chunks("/v1/completions", {"prompt": "a", "max_tokens": -1}))
            return answers

    connections: list[object] = []
    made = H11Protocol.connection_made
    with pytest.MonkeyPatch.context() as patch, Stack() as stack:
        patch.setattr(
            H11Protocol, "connection_made", lambda p, t: connections.append(p) or made(p, t)
        )
        assert all(answer.startswith(text) for answer in asyncio.run(ask(stack.url)))
    assert len(connections) == 1


def test_chat_in_process() -> None:
    stdin = "Hello\n/help\n/reset\n\nHello\n/exit\nnever asked\n"
    result = radix("chat", "--temperature", "0", "--max-new-tokens", "5", *SMALL, stdin=stdin)
    assert result.returncode == 0, result.stderr
    before, _, after = result.stdout.partition("/reset")
    assert before.strip() and after.strip().splitlines()[-1] == before.strip().splitlines()[0]


def test_chat_and_bench_with_a_server(tmp_path: Path) -> None:
    with Server() as server:
        argv = ("chat", "--url", server.url, "--temperature", "0", "--max-new-tokens", "5")
        result = radix(*argv, stdin="Hello\n/reset\nHello\n")
        first, second = result.stdout.splitlines()
        assert first == second and result.returncode == 0
        report = tmp_path / "bench.json"
        result = radix(
            "bench", "serve", "--url", server.url, "--num-prompts", "6", "--input-len", "20:40",
            "--output-len", "5:9", "--max-concurrency", "3", "--json", str(report),
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        found = json.loads(report.read_text())
        again = (
            "--url",
            server.url,
            "--num-prompts",
            "6",
            "--input-len",
            "20:40",
            "--output-len",
            "5:9",
        )
        assert radix("bench", "serve", *again, "--json", str(report)).returncode == 0
    # A second run does not measure what the first one has left in the cache.
    assert json.loads(report.read_text())["cache_hit_rate"] == found["cache_hit_rate"] == 0
    lengths = read_lengths(flags(num_prompts=6, input_len=(20, 40), output_len=(5, 9)))
    assert found["requests"] == 6 and found["failed"] == 0
    assert found["prompt_tokens"] == sum(n for n, _ in lengths)
    assert found["output_tokens"] == sum(n for _, n in lengths)
    for name in ("output", "decode", "prefill"):
        assert found[f"{name}_tokens_per_second"] > 0
    assert found["ttft_ms"]["p99"] >= found["ttft_ms"]["p50"] > 0 and found["itl_ms"]["p95"] > 0
    result = radix("chat", "--url", server.url, stdin="Hello\n")
    assert "error: no answer from the server" in result.stdout


def test_bench_offline(tmp_path: Path, here: Run) -> None:
    report = tmp_path / "bench.json"
    workload = ROOT / "bench" / "serving" / "workloads" / "offline256.json"
    result = here(
        "bench", "offline", "--workload", str(workload), "--num-prompts", "2", *SMALL,
        "--json", str(report),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    lengths = json.loads(workload.read_text())["requests"][:2]
    assert found["prompt_tokens"] == sum(p for p, _ in lengths)
    assert found["output_tokens"] == sum(o for _, o in lengths)


def test_bench_offline_with_prompts_that_do_not_fit(here: Run) -> None:
    result = here("bench", "offline", "--input-len", "100000", "--num-prompts", "1", *SMALL)
    assert result.returncode == 78 and result.stderr.strip().splitlines()[-1].startswith(
        "radix: error: "
    ), result.stderr
    assert "Traceback" not in result.stderr and "100000" in result.stderr


def test_bench_offline_with_dummy_weights(tmp_path: Path, here: Run) -> None:
    config = json.loads((ROOT / "runtime/radix_runtime/demo_model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    argv = ("--load-format", "dummy", "--num-prompts", "2", "--input-len", "8", "--output-len", "3")
    result = here("bench", "offline", str(tmp_path), *argv, *SMALL)
    assert result.returncode == 0, result.stdout + result.stderr


def flags(**given: object) -> argparse.Namespace:
    unset = {
        "workload": None,
        "num_prompts": None,
        "input_len": (1, 1),
        "output_len": (1, 1),
        "workload_seed": 0,
    }
    return argparse.Namespace(**{**unset, **given})


def test_workloads(tmp_path: Path) -> None:
    assert token_range("7") == (7, 7) and token_range("100:1024") == (100, 1024)
    given = flags(num_prompts=50, input_len=(3, 9), output_len=(2, 2), workload_seed=1)
    items = make_items(read_lengths(given), 17)
    assert {len(i.prompt) for i in items} == set(range(3, 10))
    assert all(0 <= token < 17 for i in items for token in i.prompt)
    assert items == make_items(read_lengths(given), 17)
    with pytest.raises(ConfigError, match="workload"):
        read_lengths(flags(workload="/no/such/file"))
    for requests in ([], [[0, 5]], [[5, -1]], [[5]], [[5, "x"]]):
        file = tmp_path / "workload.json"
        file.write_text(json.dumps({"requests": requests}))
        with pytest.raises(ConfigError, match="workload"):
            read_lengths(flags(workload=str(file)))


def test_bench_refuses_a_workload_before_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--workload", str(tmp_path / "absent")]
    assert (
        main(["bench", "offline", "--model-path", str(tmp_path), *argv]) == 78
    )  # a folder without a model
    assert "cannot read the workload" in capsys.readouterr().err


NONSENSE = [
    "--num-prompts=-1", "--num-prompts=0", "--num-prompts=x", "--input-len=0", "--input-len=9:4", "--input-len=4:x",
    "--output-len=0", "--output-len=-5:5", "--temperature=-1", "--temperature=nan",
]  # fmt: skip
NO_LOAD = [
    "--request-rate=0",
    "--request-rate=-2",
    "--request-rate=nan",
    "--max-concurrency=-3",
    "--vocab-size=0",
]


@pytest.mark.parametrize(
    "argv", [*product(["serve", "offline"], NONSENSE), *product(["serve"], NO_LOAD)]
)
def test_bench_refuses_nonsense_before_it_does_anything(
    argv: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", *argv])
    out, error = capsys.readouterr()
    assert (
        code == 78 and argv[1].partition("=")[0] in error and error.count("\n") == 1 and out == ""
    )


def test_a_client_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from radix_runtime.cli import main\n"
        "assert main(['chat', '--url', 'http://127.0.0.1:9']) == 0; print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        env=environment("/tmp"),
        check=False,
    )
    assert done.stdout.endswith("False\n"), done.stderr


def test_chat_refuses_what_would_do_nothing_with_a_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags, name in ((["--page-size", "4"], "--page-size"), (["/a/model"], "--model-path")):
        assert main(["chat", "--url", "http://127.0.0.1:9", *flags]) == 78
        assert capsys.readouterr().err == f"radix: error: {name} does nothing with --url\n"
    assert main(["chat", "--server-key", "k"]) == 78 and "--server-key" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:surrogateescape", "ascii"])
def test_chat_survives_bytes_and_characters_that_the_terminal_lacks(encoding: str) -> None:
    with Stack() as stack:
        command = [
            sys.executable,
            "-m",
            "radix_runtime.cli",
            "chat",
            "--url",
            stack.url,
            "--max-new-tokens",
            "30",
        ]
        env = {**environment("/tmp"), "PYTHONIOENCODING": encoding}
        result = subprocess.run(
            command,
            input=b"caf\xff\nHello\n",
            capture_output=True,
            timeout=60,
            env=env,
            check=False,
        )
        assert result.returncode == 0 and not result.stderr, result.stderr
        assert result.stdout.count(b"\n") >= 2 and stack.manager.counts.ok == 2


def test_a_url_that_is_none() -> None:
    for url in ("nonsense", "http://[::1", "http://127.0.0.1:x"):
        result = radix("bench", "serve", "--url", url, "--num-prompts", "1")
        assert (
            result.returncode == 70
            and result.stderr.count("\n") == 1
            and "no answer from the server" in result.stderr
        )


def test_figures_by_hand() -> None:
    """Two requests at time 0 and 1; one has failed and counts as such only."""
    first = Record(10, 0.0, [2.0, 3.0, 5.0], 5.0, output_tokens=3, cached_tokens=4)
    second = Record(20, 1.0, [4.0, 6.0], 6.0, output_tokens=2)
    found = figures([first, second, Record(5, 0.0, error="no")])
    assert (found["requests"], found["failed"]) == (3, 1)
    assert found["output_tokens_per_second"] == pytest.approx(5 / 6)
    assert found["prefill_tokens_per_second"] == pytest.approx(26 / 4)
    assert found["decode_tokens_per_second"] == pytest.approx(3 / 4)
    assert found["cache_hit_rate"] == pytest.approx(4 / 30)
    assert found["ttft_ms"]["mean"] == pytest.approx(2500)
    assert found["tpot_ms"]["max"] == pytest.approx(2000)
    assert found["itl_ms"]["p50"] == pytest.approx(2000)
    assert figures([Record(5, 0.0, error="no")]) == {"requests": 1, "failed": 1}
