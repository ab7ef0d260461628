"""`--config FILE`: flags in a file, through the definitions of the command line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from radix_runtime.cli import main
from radix_runtime.cli.bench import add_arguments as add_bench_arguments
from radix_runtime.cli.config_file import MAX_BYTES
from radix_runtime.cli.flags import Parser, add_model_argument, add_server_flags, server_args
from radix_runtime.config import ServerArgs, flag_name
from radix_runtime.errors import ConfigError
from tests.runtime.command import SMALL, radix


def parse(folder: Path, text: str | bytes, *argv: str) -> ServerArgs:
    """What `radix serve --config FILE *argv` would serve, with `text` in the file."""
    path = folder / "serve.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    parser = Parser(prog="radix serve")
    add_model_argument(parser)
    add_server_flags(parser)
    return server_args(parser.parse_args(["--config", str(path), *argv]))


def test_flags_of_every_kind(tmp_path: Path) -> None:
    text = """
        # two GPUs
        model-path: Qwen/Qwen3-0.6B
        tensor_parallel_size: 2
        max-model-len: 4_096
        gpu-memory-utilization: .5
        cuda-graph-bs: [1, 2, 4]
        disable_radix_cache: true
        enable-metrics: yes
        log-requests: false
        kv-cache-dtype: fp8
        log_level: DEBUG
        host: 0.0.0.0
    """
    assert parse(tmp_path, text) == ServerArgs(
        model_path="Qwen/Qwen3-0.6B", tp_size=2, context_length=4096, mem_fraction_static=0.5,
        cuda_graph_bs=[1, 2, 4], disable_radix_cache=True, kv_cache_dtype="fp8_e4m3",
        log_level="debug", host="0.0.0.0",
    )  # fmt: skip
    # As for a flag of the command line, one value may be a list of one.
    assert parse(tmp_path, "cuda-graph-bs: 8").cuda_graph_bs == [8]


def test_every_name_that_the_command_line_knows(tmp_path: Path) -> None:
    """A value that is not the default, under each spelling of each setting."""
    others = {"int": "3", "float": "0.5", "str": "x", "list": "[3]", "bool": "true"}
    for setting in fields(ServerArgs):
        names = [flag_name(setting.name), *setting.metadata["aliases"], setting.name]
        kind = next(kind for kind in others if kind in str(setting.type))
        if "list" in str(setting.type):
            kind = "list"
        word = others[kind]
        choices = setting.metadata.get("choices")
        if choices:
            word = next(choice for choice in choices if choice != setting.default)
        for name in names:
            path = tmp_path / "one.yaml"
            path.write_text(f"{name.lstrip('-')}: {word}\n")
            parser = Parser(prog="radix serve")
            add_server_flags(parser)
            found = getattr(parser.parse_args(["--config", str(path)]), setting.name)
            assert found != setting.default, name
            assert str(found).lower() == word.lower(), name


def test_json_is_yaml(tmp_path: Path) -> None:
    settings = {"tp": 2, "disable-radix-cache": False, "cuda_graph_bs": [1, 2], "seed": -1}
    expected = ServerArgs(tp_size=2, cuda_graph_bs=[1, 2], random_seed=-1)
    for indent in (None, 2, "\t"):
        assert parse(tmp_path, json.dumps(settings, indent=indent)) == expected


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    text = "port: 1\nmodel: a\ncuda-graph-bs: [1, 2]\ntp-size: 4"
    assert parse(tmp_path, text, "--port", "30000").port == 30000  # the default, said
    args = parse(tmp_path, text, "b", "--cuda-graph-bs", "3", "--disable-radix-cache")
    assert args == ServerArgs(
        model_path="b", port=1, cuda_graph_bs=[3], tp_size=4, disable_radix_cache=True
    )
    with pytest.raises(ConfigError, match="given twice"):
        parse(tmp_path, text, "b", "--model-path", "c")
    with pytest.raises(ConfigError, match="given twice"):  # although one is that of the file
        parse(tmp_path, "model-path: a", "b", "--model-path", "a")


def test_words_are_those_of_the_file(tmp_path: Path) -> None:
    """What YAML would take for numbers and dates stays what was written."""
    text = """
        revision: 010
        served-model-name: 2026-01-01
        api-key: 1_000.50
        tokenizer-path: "true"
        download-dir: -x
        check-invariants: off
        max-queue-seconds: 1e3
        port: "08000"
    """
    args = parse(tmp_path, text)
    assert (args.revision, args.served_model_name, args.api_key) == (
        "010",
        "2026-01-01",
        "1_000.50",
    )
    assert (args.tokenizer_path, args.download_dir) == ("true", "-x")
    assert args.check_invariants == "off"
    assert (args.max_queue_seconds, args.port) == (1000.0, 8000)


@pytest.mark.parametrize("text", ["", "# port: 1\n", "{}", "---\n...\n"])
def test_nothing_is_no_settings(text: str, tmp_path: Path) -> None:
    assert parse(tmp_path, text) == ServerArgs()


def test_anchors_are_words_too(tmp_path: Path) -> None:
    args = parse(tmp_path, "host: &name localhost\nserved-model-name: *name")
    assert (args.host, args.served_model_name) == ("localhost", "localhost")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("port: 1\nprot: 2", 2, "unknown key prot; did you mean port?"),
        ("tensor_paralel_size: 2", 1, "did you mean tensor-parallel-size?"),
        ("--port: 2", 1, "did you mean port?"),
        ('"a\\nb": 2', 1, r"unknown key 'a\nb'"),
        ("enable-overlap-schedule: true", 1, "unknown key enable-overlap-schedule"),
        ("trust_remote_code: true", 1, "trust_remote_code: no code of a model's directory"),
        ("enforce-eager: true", 1, "enforce-eager: see --disable-cuda-graph"),
        ("help: true", 1, "unknown key help"),
        ("config: other.yaml", 1, "config: a file of flags names no other"),
        ("port: 1\nport: 1", 2, "port: given before, as port"),
        ("tp-size: 1\n\ntensor_parallel_size: 1", 3, "tensor_parallel_size: given before, as tp-s"),
        ("log-requests: false\nlog_requests: true", 2, "log_requests: given before"),
        ("port: x", 1, "port: invalid int value: 'x'"),
        ("port: 1.5", 1, "port: invalid int value: '1.5'"),
        ("port: true", 1, "port: a value is expected, not true or false"),
        ("quantization: true", 1, "quantization: a value is expected, not true or false"),
        ("max-queue-seconds: soon", 1, "max-queue-seconds: invalid float value: 'soon'"),
        ("log-requests: 1", 1, "log-requests: true or false is expected"),
        ("log-requests: 'true'", 1, "log-requests: true or false is expected"),
        ("log-requests: [true]", 1, "log-requests: true or false is expected"),
        ("log-requests:", 1, "log-requests: true or false is expected"),
        ("enable_prefix_caching: false", 1, "it cannot be false: prefixes are shared unless --dis"),
        ("api-key:", 1, "api-key: there is no value"),
        ("api-key: null", 1, "api-key: there is no value"),
        ("host: [a, b]", 1, "host: one value is expected, not a list"),
        ("host: {a: b}", 1, "host: a value is expected, not a mapping"),
        ("json-model-override-args: {a: 1}", 1, "a value is expected, not a mapping"),
        ("cuda-graph-bs: []", 1, "cuda-graph-bs: the list is empty"),
        ("cuda-graph-bs: [1, [2]]", 1, "cuda-graph-bs: a value is expected, not a list in a list"),
        ("cuda-graph-bs: [1, a]", 1, "cuda-graph-bs: invalid int value: 'a'"),
        ("host: !!python/name:os.system a", 1, "host: a value is expected, without a tag"),
        ("<<: {port: 1}", 1, "unknown key <<"),
        ("[a]: 1", 1, "a key must be the name of a flag"),
        ("port: 1\n b: 2", 2, "not YAML: mapping values are not allowed here"),
        ("port: *x", 1, "not YAML: found undefined alias"),
        ("port: 1\n---\nport: 2", 2, "not YAML: but found another document"),
        ("port: 1\n\tb: 2", 2, "not YAML: found character"),
    ],
)
def test_what_cannot_be_is_one_line_with_file_and_key(
    text: str, line: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert main(["serve", "model", "--config", str(path)]) == 78
    out, error = capsys.readouterr()
    assert error.startswith(f"radix: error: {path}, line {line}: ") and error.count("\n") == 1
    assert message in error and out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"- port\n- 1", "must be a mapping of flags to their values"),
        (b"port", "must be a mapping of flags to their values"),
        (b"host: \xff", "not YAML: invalid start byte"),
        (b"host: a\x00", "not YAML: special characters are not allowed"),
        (b'host: "\\UFFFFFFFF"', "not YAML"),
        (b"host: " + b"[" * 20_000, "nested too deeply"),
        (b"#" * MAX_BYTES + b"\n", "larger than 64 KiB"),
    ],
)
def test_what_is_no_file_of_flags(text: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse(tmp_path, text)
    assert str(tmp_path / "serve.yaml") in str(raised.value) and "\n" not in str(raised.value)


def test_aliases_of_aliases_take_nothing(tmp_path: Path) -> None:
    """Of a bomb of 10 ** 9 lists the nodes alone are made."""
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(ConfigError, match="unknown key a"):
        parse(tmp_path, "\n".join(lines))


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        assert main(["serve", "--config", str(path)]) == 78
        error = capsys.readouterr().err
        assert f"--config {path}: {reason}" in error and error.count("\n") == 1


def test_errors_show_nothing_of_keys(tmp_path: Path) -> None:
    for text in ("api-key: 'secret", "api-key: secret: x", "api-key: [secret]", "api-key: {secret"):
        with pytest.raises(ConfigError) as raised:
            parse(tmp_path, text)
        assert "secret" not in str(raised.value)


def test_settings_are_shown_whatever_their_source(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("page_size: 4\nmax-model-len: 512\napi-key: secret-key\n")
    shown = radix("serve", "--config", str(path), "--explain-config", "--max-model-len", "256")
    assert shown.returncode == 0, shown.stderr
    lines = dict(line[2:].split() for line in shown.stdout.splitlines() if line[0] == "*")
    assert (lines["--page-size"], lines["--context-length"]) == ("4", "256")
    assert lines["--api-key"] == "***" and "secret-key" not in shown.stdout
    started = radix("serve", "/no/such/model", "--config", str(path), "--port", "0")
    assert "--context-length 512 --page-size 4 --port 0 --api-key ***" in started.stderr
    assert "secret-key" not in started.stderr


def test_a_command_has_its_own_flags_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "generate.yaml"
    path.write_text("max-new-tokens: 3\ntemperature: 0\nchat: true\npage_size: 8\n")
    done = radix("generate", "-p", "Hi", "--config", str(path), *SMALL)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    path.write_text("host: localhost\n")  # a generate has no server
    done = radix("generate", "-p", "Hi", "--config", str(path))
    assert done.returncode == 78 and "unknown key host" in done.stderr


def test_the_file_of_a_mode_of_bench(tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text(
        "model: m\nnum-prompts: 7\nslo: ['ttft:500']\nstream: true\nrandom_output_len: 5\n"
    )
    parser = Parser(prog="radix bench")
    add_bench_arguments(parser)
    found = parser.parse_args(["offline", "--config", str(path), "--num-prompts", "9"])
    assert (found.model_path, found.num_prompts, found.slo) == ("m", 9, {"ttft": 500.0})
    assert found.stream and found.output_len == (5, 5)
