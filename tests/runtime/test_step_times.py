"""What the steps took: the ring, `--trace`, and /step_trace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from radix_runtime import device
from radix_runtime.cli.bench_steps import lines, summaries
from radix_runtime.errors import ConfigError
from radix_runtime.offline import Engine
from radix_runtime.scheduler.step_log import StepLog, TraceFile
from radix_runtime.step_times import RING_STEPS, StepTimes, chrome_trace
from tests.runtime.command import Run

SMALL_ENGINE: dict[str, Any] = {"max_total_tokens": 512, "context_length": 256}


def times(step: int, **changes: Any) -> StepTimes:
    """A step of 1 ms: 0.1 of planning, 0.1 of launching, 0.6 on the device, 0.1 of results."""
    start = 1e-3 * step
    values: dict[str, Any] = {
        "step_id": step,
        "num_decode": 3,
        "num_chunks": 0,
        "num_tokens": 3,
        "planned": start,
        "launched": start + 1e-4,
        "queued": start + 2e-4,
        "awaited": start + 3e-4,
        "completed": start + 8e-4,
        "accepted": start + 9e-4,
        "device_start": start + 2e-4,
        "device_end": start + 8e-4,
    }
    return StepTimes(**{**values, **changes})


def spans(events: list[dict[str, Any]], row: str) -> list[dict[str, Any]]:
    """The spans of a row of the picture."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return [e for e in events if e["ph"] == "X" and names[e["tid"]] == row]


def test_events_of_a_step() -> None:
    prefill = times(1, num_decode=0, num_chunks=2, num_tokens=640)
    mixed = times(2, num_chunks=1, num_tokens=67)
    events = json.loads(chrome_trace([times(0), prefill, mixed]))["traceEvents"]
    host = spans(events, "scheduler")
    assert [e["name"] for e in host] == 3 * ["plan", "launch", "wait", "results"]
    assert [e["dur"] for e in host[:4]] == pytest.approx([100, 100, 500, 100])
    device = spans(events, "device")
    assert [e["name"] for e in device] == ["decode 3", "prefill 640", "mixed 3 + 64"]
    assert [e["ts"] for e in device] == pytest.approx([200, 1200, 2200])
    assert [e["dur"] for e in device] == pytest.approx([600, 600, 600])
    assert "gap_us" not in device[0]["args"]
    assert [e["args"]["gap_us"] for e in device[1:]] == pytest.approx([400, 400])
    assert device[2]["args"]["tokens"] == 67


def test_a_device_that_does_not_tell() -> None:
    silent = times(0, device_start=math.nan, device_end=math.nan)
    events = json.loads(chrome_trace([silent, times(1)]))["traceEvents"]
    device = spans(events, "device")
    assert len(device) == 1 and "gap_us" not in device[0]["args"]


def test_the_ring_keeps_the_last() -> None:
    log = StepLog()
    for step in range(RING_STEPS + 5):
        log.add(times(step))
    assert [t.step_id for t in log.recent] == list(range(5, RING_STEPS + 5))


@pytest.mark.parametrize("steps", [0, 1, 255, 256, 700])
def test_file(tmp_path: Path, steps: int) -> None:
    """Whole after `close`, and the same events as at once; gaps across its pieces included."""
    file = tmp_path / "trace.json"
    log = StepLog(str(file))
    for step in range(steps):
        log.add(times(step))
    log.flush()
    cut_off = json.loads(file.read_text() + "]")
    log.close()
    log.close()
    events = json.loads(file.read_text())
    assert events == cut_off
    assert events == json.loads(chrome_trace(map(times, range(steps))))["traceEvents"]


def test_a_file_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace .*/none/trace\.json: No such file"):
        StepLog(str(tmp_path / "none" / "trace.json"))


def test_a_full_disk_ends_the_trace_alone(caplog: pytest.LogCaptureFixture) -> None:
    trace = TraceFile(Path("/dev/full"))
    trace.add(times(0))
    trace.flush()
    trace.add(times(1))
    trace.close()
    assert [r.message for r in caplog.records] == [
        "the trace ends here: [Errno 28] No space left on device"
    ]


def test_summary_by_kind(tmp_path: Path) -> None:
    """The figures of a trace that a crash has cut off."""
    file = tmp_path / "trace.json"
    log = StepLog(str(file))
    log.add(times(0, num_decode=0, num_chunks=1, num_tokens=9))
    for step in range(1, 5):
        log.add(times(step, device_end=1e-3 * (step + 1)))
    log.add(times(5, device_start=math.nan, device_end=math.nan, num_decode=4))
    log.flush()
    by_name = {summary.name: summary for summary in summaries(file)}
    assert list(by_name) == ["decode 3", "prefill", "decode 4"]
    decode = by_name["decode 3"]
    assert decode.steps == 4
    # 800 us each; 400 us behind the prompt, then 200.
    assert decode.device == pytest.approx(800) and decode.gap == pytest.approx(200)
    assert decode.idle == pytest.approx(1000 / 4200)
    assert (decode.plan, decode.launch) == (pytest.approx(100), pytest.approx(100))
    assert (decode.wait, decode.results) == (pytest.approx(500), pytest.approx(100))
    assert by_name["decode 4"].device is None and by_name["decode 4"].idle is None
    table = lines(list(by_name.values()))
    assert len(table) == 4 and "23.8%" in table[1]


def test_command(tmp_path: Path, here: Run) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(chrome_trace(map(times, range(3))))
    report = tmp_path / "report.json"
    done = here("bench", "steps", str(file), "--json", str(report))
    assert done.returncode == 0 and "decode 3" in done.stdout
    assert json.loads(report.read_text())[0]["steps"] == 3
    file.write_text("{")
    refused = here("bench", "steps", str(file))
    assert refused.returncode == 78 and "is no trace in Chrome's format" in refused.stderr


@pytest.mark.parametrize("overlap", [False, True])
def test_engine(tmp_path: Path, overlap: bool) -> None:
    """Every step is there once, in order, and on the CPU within what the host waited for."""
    file = tmp_path / "trace.json"
    params = {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}
    with Engine(trace=str(file), disable_overlap_schedule=not overlap, **SMALL_ENGINE) as engine:
        engine.generate(input_ids=[[5, 6, 7], [8, 9]], sampling_params=params)
    events = json.loads(file.read_text())
    device = spans(events, "device")
    assert [e["args"]["step"] for e in device] == list(range(len(device)))
    assert device[0]["name"] == "prefill 5"
    assert {e["name"] for e in device[1:]} == {"decode 2"}
    assert all(e["dur"] > 0 for e in device)
    assert all(e["args"]["gap_us"] >= 0 for e in device[1:])
    host = spans(events, "scheduler")
    for number, step in enumerate(device):
        plan, launch, wait, results = host[4 * number : 4 * number + 4]
        assert [e["name"] for e in (plan, launch, wait, results)] == [
            "plan",
            "launch",
            "wait",
            "results",
        ]
        assert launch["ts"] <= step["ts"]
        assert step["ts"] + step["dur"] <= wait["ts"] + wait["dur"] + 1  # rounded to 1 ns


def test_route(client: httpx.Client) -> None:
    """The last steps over HTTP; the fake engine does not tell when its device worked."""
    body = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    assert client.post("/v1/completions", json=body).status_code == 200
    answer = client.get("/step_trace")
    assert answer.headers["content-type"] == "application/json"
    events = answer.json()["traceEvents"]
    launched = [e["args"]["step"] for e in spans(events, "scheduler") if e["name"] == "launch"]
    assert len(launched) >= 20 and launched == sorted(launched)
    assert spans(events, "device") == []
    few = client.get("/step_trace", params={"steps": 2}).json()["traceEvents"]
    assert [e["name"] for e in spans(few, "scheduler")] == 2 * ["plan", "launch", "wait", "results"]
    for wrong in ("0", "-1", "x", "1e9", str(RING_STEPS + 1)):
        refused = client.get("/step_trace", params={"steps": wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "steps"


class FakeEvent:
    """Of a GPU whose stream reaches each event when the test says."""

    reached: list[float] = []  # milliseconds of the GPU's clock, of the next events
    is_idle = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = self.reached.pop(0)

    def query(self) -> bool:
        return self.is_idle

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def test_gpu_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of a busy stream are chained; one that comes to an idle stream starts now."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    host = iter([50.0, 60.0])
    monkeypatch.setattr(device.time, "monotonic", lambda: next(host))
    monkeypatch.setattr(FakeEvent, "reached", [7.0, 9.0, 9.5, 12.5, 700.0, 701.0])
    clock = device.Device("cuda", torch.device("cuda")).clock()
    spans_of_steps = []
    for is_idle in (True, False, True):
        monkeypatch.setattr(FakeEvent, "is_idle", is_idle)
        start = clock.start()
        spans_of_steps.append(device.Span(clock, start=start, end=clock.end()))
    found = [span.seconds() for span in spans_of_steps]
    assert found[0] == pytest.approx((50.0, 50.002))
    assert found[1] == pytest.approx((50.0025, 50.0055))
    assert found[2] == pytest.approx((60.0, 60.001))
