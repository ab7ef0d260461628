"""`radix bench`: workloads, figures, and both modes."""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import pytest

from radix_runtime.cli import main
from radix_runtime.cli.figures import Record, figures
from radix_runtime.cli.workload import make_items, read_lengths, token_range
from radix_runtime.errors import ConfigError
from tests.runtime.command import SMALL, Run, radix
from tests.runtime.server_process import ROOT, Server


def test_chat_and_bench_with_a_server(tmp_path: Path) -> None:
    with Server() as server:
        argv = ("chat", "--url", server.url, "--temperature", "0", "--max-new-tokens", "5")
        result = radix(*argv, stdin="Hello\n/reset\nHello\n")
        first, second = result.stdout.splitlines()
        assert first == second and result.returncode == 0
        report = tmp_path / "bench.json"
        workload = "--num-prompts 6 --input-len 20:40 --output-len 5:9".split()
        argv = ("bench", "serve", "--url", server.url, *workload, "--json", str(report))
        result = radix(*argv, "--max-concurrency", "3")
        assert result.returncode == 0, result.stdout + result.stderr
        found = json.loads(report.read_text())
        assert radix(*argv).returncode == 0
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
    argv = ("--workload", str(workload), "--num-prompts", "2", "--json", str(report))
    result = here("bench", "offline", *argv, *SMALL)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    lengths = json.loads(workload.read_text())["requests"][:2]
    assert found["prompt_tokens"] == sum(p for p, _ in lengths)
    assert found["output_tokens"] == sum(o for _, o in lengths)


def test_bench_offline_with_prompts_that_do_not_fit(here: Run) -> None:
    result = here("bench", "offline", "--input-len", "100000", "--num-prompts", "1", *SMALL)
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 78 and last.startswith("radix: error: "), result.stderr
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
    argv = ["--workload", str(tmp_path / "absent"), "--model-path", str(tmp_path)]  # no model
    assert main(["bench", "offline", *argv]) == 78
    assert "cannot read the workload" in capsys.readouterr().err


NONSENSE = [
    "--num-prompts=-1",
    "--num-prompts=0",
    "--num-prompts=x",
    "--input-len=0",
    "--input-len=9:4",
    "--input-len=4:x",
    "--output-len=0",
    "--output-len=-5:5",
    "--temperature=-1",
    "--temperature=nan",
]


NONSENSE_OF_A_CLIENT = [
    "--request-rate=0",
    "--request-rate=-2",
    "--request-rate=nan",
    "--max-concurrency=-3",
    "--vocab-size=0",
]


@pytest.mark.parametrize(
    "argv", [*product(["serve", "offline"], NONSENSE), *product(["serve"], NONSENSE_OF_A_CLIENT)]
)
def test_bench_refuses_nonsense_before_it_does_anything(
    argv: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", *argv])
    out, error = capsys.readouterr()
    assert code == 78 and out == ""
    assert argv[1].partition("=")[0] in error and error.count("\n") == 1


def test_a_url_that_is_none() -> None:
    for url in ("nonsense", "http://[::1", "http://127.0.0.1:x"):
        result = radix("bench", "serve", "--url", url, "--num-prompts", "1")
        assert result.returncode == 70 and result.stderr.count("\n") == 1
        assert "no answer from the server" in result.stderr


def test_figures_by_hand() -> None:
    """Two requests at time 0 and 1; one has failed and counts as such only."""
    first = Record(
        prompt_tokens=10,
        start=0.0,
        chunks=[2.0, 3.0, 5.0],
        end=5.0,
        output_tokens=3,
        cached_tokens=4,
    )
    second = Record(prompt_tokens=20, start=1.0, chunks=[4.0, 6.0], end=6.0, output_tokens=2)
    failed = Record(prompt_tokens=5, start=0.0, error="no")
    found = figures([first, second, failed])
    assert (found["requests"], found["failed"]) == (3, 1)
    assert found["output_tokens_per_second"] == pytest.approx(5 / 6)
    assert found["prefill_tokens_per_second"] == pytest.approx(26 / 4)
    assert found["decode_tokens_per_second"] == pytest.approx(3 / 4)
    assert found["cache_hit_rate"] == pytest.approx(4 / 30)
    assert found["ttft_ms"]["mean"] == pytest.approx(2500)
    assert found["tpot_ms"]["max"] == pytest.approx(2000)
    assert found["itl_ms"]["p50"] == pytest.approx(2000)
    assert figures([failed]) == {"requests": 1, "failed": 1}
