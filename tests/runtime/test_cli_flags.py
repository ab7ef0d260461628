"""Flags of the command `radix`: names, aliases, values that cannot work."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from radix_runtime.cli import main
from radix_runtime.cli.flags import Parser, add_server_flags, server_args
from radix_runtime.config import ServerArgs, flag_name
from radix_runtime.errors import ConfigError
from tests.runtime.command import radix


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
        (["--enforce-eager"], "--enforce-eager: see --disable-cuda-graph"),
        (["--no-enable-prefix-caching"], "see --disable-radix-cache"),
        (["--max-run", "3"], "unknown flag --max-run"),
        (["extra"], "extra"),
        (["--port", "x"], "--port"),
        (["--dtype", "int3"], "--dtype"),
        (["--trust-remote-code"], "no code of a model's directory is ever run"),
        (
            ["--kv-cache-dtype", "fp8_e5m2"],
            "fp8_e5m2: no kernel reads it; fp8_e4m3 is as small and more precise; there are auto,",
        ),
        (["--enable-prefix-caching", "--disable-radix-cache"], "exclude each other"),
    ],
)
def test_bad_flags_exit_with_78_and_one_line(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "model", *argv]) == 78
    out, error = capsys.readouterr()
    assert error.startswith("radix: error: ") and error.count("\n") == 1
    assert text in error and out == ""


def test_no_flag_is_taken_for_its_opposite(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--enable-overlap-schedule", "--disable-docs", "--en"):
        assert main(["serve", flag]) == 78
        assert capsys.readouterr().err == f"radix: error: unknown flag {flag}\n"


def test_values_and_flags_that_users_of_other_servers_type() -> None:
    for flags, expected in (
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--dtype", "float"], {"dtype": "float32"}),
        (["--dtype", "BF16"], {"dtype": "bfloat16"}),
        (["--kv-cache-dtype", "fp32"], {"kv_cache_dtype": "float32"}),
        (["--log-level", "INFO"], {}),
        (["--log-level", "DEBUG"], {"log_level": "debug"}),
        (["--enable-prefix-caching", "--enable-metrics", "--enable-chunked-prefill"], {}),
    ):
        assert parse(*flags) == ServerArgs(**expected)  # type: ignore[arg-type]
    assert ServerArgs(dtype="half").dtype == "float16"  # Engine too


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


def test_help_version_and_unknown_command() -> None:
    assert re.fullmatch(r"radix \d+\.\d+\.\d+\n", radix("--version").stdout)
    overview = radix()
    assert overview.returncode == 0 and "doctor" in overview.stdout
    assert radix("sevre").returncode == 78
    result = radix("serve", "--explain-config", "--page-size", "4", "--api-key", "secret-key")
    assert "* --page-size" in result.stdout and "secret-key" not in result.stdout
