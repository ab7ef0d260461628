"""Constrained answers of a real server: hostile grammars, and grammar processes that are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from jsonschema import Draft202012Validator

from tests.runtime.mask_rig import TOKENIZER
from tests.runtime.server_process import Server

pytestmark = pytest.mark.serial  # limits of seconds, on grammars and on restarts

FULL = bool(os.environ.get("RADIX_TEST_FULL"))
STREAMS = 32 if FULL else 16
HOSTILE = 200 if FULL else 60
HEALTH_LOOKS = 400 if FULL else 20
MASKS = "radix: grammar masks"
COMPILER = "radix: grammar compiler"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--dtype", "float32", "--check-invariants", "step") as running:
        yield running


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def chat(server: Server, **fields: Any) -> httpx.Response:
    message = {"role": "user", "content": "Give me an object."}
    body = {"messages": [message], "max_tokens": 64, "seed": 5, **fields}
    return post(server, "/v1/chat/completions", body)


def stream_ids(server: Server, number: int) -> tuple[list[int], str]:
    """The tokens and the text of one stream of a fixed answer; every second one is constrained."""
    sampling: dict[str, Any] = {"max_new_tokens": 120, "temperature": 0.9, "sampling_seed": number}
    if number % 2:
        sampling["regex"] = "([a-z]{1,6} ){30}end"
    else:
        sampling["ignore_eos"] = True
    body = {"text": f"Story {number}:", "sampling_params": sampling, "stream": True}
    last: dict[str, Any] = {}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])
                assert "error" not in last, last
    return last["output_ids"], last["text"]


def all_streams(server: Server, meanwhile: Callable[[], None]) -> list[tuple[list[int], str]]:
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream_ids, server, number) for number in range(STREAMS)]
        meanwhile()
        return [stream.result() for stream in streams]


def process(server: Server, title: str) -> psutil.Process:
    for one in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if title in " ".join(one.cmdline()) and one.status() != psutil.STATUS_ZOMBIE:
                return one
        except psutil.NoSuchProcess:
            continue
    raise AssertionError(f"there is no {title}")


def requests_of(server: Server) -> int:
    """How many have come to the scheduler."""
    state = httpx.get(f"{server.url}/get_server_info").json()["internal_states"][0]
    return int(state["num_requests_total"])


def check_idle(server: Server) -> None:
    """Nothing is open, and the scheduler has found its own state right."""
    deadline = time.monotonic() + 30
    while True:
        state = httpx.get(f"{server.url}/get_server_info").json()["internal_states"][0]
        if state["num_running_reqs"] == 0 and state["num_queue_reqs"] == 0:
            break
        assert time.monotonic() < deadline, state
        time.sleep(0.05)
    assert server.process.poll() is None
    assert "I5" not in server.log() and "InvariantViolation" not in server.log()


def hostile(source: random.Random) -> dict[str, Any]:
    """A constraint that takes as much as it can, or is wrong."""
    depth = source.randrange(40, 2_000)
    wide = {f"p{i}": {"anyOf": [{"type": "string", "pattern": f"^a{{0,{i}}}b"}, {"type": "null"}]}
            for i in range(source.randrange(50, 400))}  # fmt: skip
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(source.randrange(30, 90)):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    branches = [{"oneOf": [{"required": [c]} for c in "abcdefgh"[: source.randrange(2, 9)]]}
                for _ in range(source.randrange(1, 5))]  # fmt: skip
    rules = source.randrange(500, 3_000)
    return source.choice(
        [
            {"json_schema": deep},
            {"json_schema": {"type": "object", "properties": wide}},
            {"json_schema": {"allOf": branches}},
            {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
            {"json_schema": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}},
                             "$ref": "#/$defs/a"}},
            {"json_schema": {"enum": ["x" * 50 + str(i) for i in range(5_000)]}},
            {"regex": "(a|b)*a" + "(a|b)" * source.randrange(10, 200)},
            {"regex": "(" * source.randrange(10, 400) + "a" + ")*" * source.randrange(10, 400)},
            {"regex": "((a{1,50}){1,50}){1,50}b"},
            {"regex": "a" * source.randrange(2_000, 4_000)},
            {"ebnf": "root ::= " + "(" * depth + '"a"' + ")" * depth},
            {"ebnf": "start: " + " ".join(f"r{i}" for i in range(rules)) + "\n"
             + "\n".join(f'r{i}: "a"? r{(i * 7 + 1) % rules}' for i in range(rules))},
            {"ebnf": "start: start start | \"a\" | \"\""},
            {"ebnf": 'root ::= "' + "x" * (65 << 10) + '"'},
            {"structural_tag": {"format": {"type": "sequence", "elements": [
                {"type": "regex", "pattern": "(x*)*y"}] * source.randrange(1, 900)}}},
        ]
    )  # fmt: skip


def test_openai_and_its_warnings(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    ended = 0
    for seed in range(8):  # some seeds like whitespace, which has no end
        choice = chat(server, response_format=form, seed=seed).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            ended += 1
            Draft202012Validator(SCHEMA).validate(json.loads(choice["message"]["content"]))
    assert ended >= 4
    odd = {"type": "string", "format": "mine", "maxLength": 3}
    answer = chat(server, json_schema=odd).json()
    assert answer["warnings"] == ["/format: 'mine' is not checked"]
    assert len(json.loads(answer["choices"][0]["message"]["content"])) <= 3


def test_a_grammar_is_refused_before_it_is_queued(server: Server) -> None:
    before = requests_of(server)
    response = chat(server, json_schema={"properties": {"x": {"uniqueItems": True}}})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_schema")
    assert error["param"] == "/properties/x/uniqueItems"
    assert requests_of(server) == before


LOOK = """
import http.client, json, sys, time
host, port, looks = sys.argv[1:]
seconds = []
for _ in range(int(looks)):
    began = time.monotonic()
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    seconds.append(time.monotonic() - began)
    time.sleep(0.02)
print(json.dumps(seconds))
"""


def with_health(server: Server, load: Callable[[], None], seconds: list[float]) -> None:
    """Runs `load`, and meanwhile asks for the health from a process that does nothing else."""
    url = httpx.URL(server.url)
    arguments = [url.host, str(url.port), str(HEALTH_LOOKS)]
    looks = subprocess.Popen([sys.executable, "-c", LOOK, *arguments], stdout=subprocess.PIPE)
    try:
        load()
    finally:
        output, _ = looks.communicate(timeout=600)
    assert looks.returncode == 0
    seconds += json.loads(output)


def figures(seconds: list[float]) -> str:
    median, late = np.percentile(seconds, [50, 99]) * 1000
    return f"p50 {median:.1f}, p99 {late:.1f}"


def test_hostile_grammars_hurt_nobody(server: Server) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    source = random.Random(seed)

    def send(bodies: list[dict[str, Any]]) -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda body: chat(server, **body, max_tokens=4), bodies))
        for body, answer in zip(bodies, answers, strict=True):
            shown = (seed, json.dumps(body)[:200], answer.text[:300])
            assert answer.status_code in (200, 400), shown
        return [answer.status_code for answer in answers]

    calm: list[float] = []
    ordinary = [{"json_schema": {**SCHEMA, "title": str(number)}} for number in range(HOSTILE)]

    def without() -> None:
        assert set(send(ordinary)) == {200}

    expected = all_streams(server, lambda: with_health(server, without, calm))
    for number in range(1, STREAMS, 2):
        assert re.match("([a-z]{1,6} )+", expected[number][1])
    statuses: list[int] = []
    under_attack: list[float] = []

    attack = [hostile(source) for _ in range(HOSTILE)]

    def meanwhile() -> None:
        with_health(server, lambda: statuses.extend(send(attack)), under_attack)

    assert all_streams(server, meanwhile) == expected
    assert {200, 400} == set(statuses)
    print(f"{statuses.count(200)} served, {statuses.count(400)} refused")
    print("GET /health, ms:", figures(calm), "without,", figures(under_attack), "with them")
    assert chat(server, regex="ok").json()["choices"][0]["message"]["content"] == "ok"
    assert httpx.get(f"{server.url}/health").status_code == 200
    check_idle(server)


def test_a_grammar_over_its_time_is_refused_and_the_next_works(server: Server) -> None:
    """Nobody else waits for it longer than for the limit."""
    slow = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(4_000))
    began = time.monotonic()
    response = chat(server, ebnf=slow[: 60 << 10] + '\nr4000: "c"')
    assert response.status_code in (200, 400)
    assert time.monotonic() - began < 20
    assert chat(server, regex="yes").status_code == 200


@pytest.mark.parametrize("title", [MASKS, COMPILER])
def test_kill_9_loses_no_request(server: Server, title: str) -> None:
    expected = all_streams(server, lambda: None)
    killed: list[int] = []

    def kill() -> None:
        for _ in range(2):
            time.sleep(0.3)
            victim = process(server, title)
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)
            began = time.monotonic()
            while True:
                try:
                    if process(server, title).pid != victim.pid:
                        break
                except AssertionError:
                    pass
                assert time.monotonic() - began < 10
                time.sleep(0.01)
            # New schemas work at once.
            assert chat(server, regex=f"[{len(killed)}a]b{title[-5:]}").status_code == 200

    assert all_streams(server, kill) == expected
    assert len(set(killed)) == 2
    check_idle(server)


def test_aborted_while_the_grammar_is_compiled(server: Server) -> None:
    """A client that goes away while it waits leaves nothing behind, and others keep the outcome."""
    body = {"text": "x", "sampling_params": {"json_schema": SCHEMA | {"title": str(time.time())}}}
    for _ in range(3):
        try:
            httpx.post(f"{server.url}/generate", json=body, timeout=0.002)
        except httpx.TimeoutException:
            pass
    answer = post(server, "/generate", body)
    assert answer.status_code == 200, answer.text
    check_idle(server)


def test_the_processes_end_with_the_server() -> None:
    with Server() as running:
        children = psutil.Process(running.process.pid).children(recursive=True)
        found = [one for one in children if "grammar" in " ".join(one.cmdline())]
        assert len(found) == 2
        running.process.terminate()
        assert running.wait_exit(20) == 0
        running.assert_nothing_left()


@pytest.fixture
def thinker() -> Iterator[Server]:
    """A server to which all answers begin with reasoning."""
    flags = ["--dtype", "float32", "--check-invariants", "step"]
    with Server(*flags, "--reasoning-parser", "deepseek-r1") as running:
        yield running


def test_a_budget_of_reasoning(thinker: Server) -> None:
    """Each is one request: whole, streamed, and with a schema."""
    before = requests_of(thinker)

    def ask(number: int, **fields: Any) -> dict[str, Any]:
        budget = 1 + number % 9
        body = {
            "max_tokens": 160,
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "thinking": {"type": "enabled", "budget_tokens": budget},
            "temperature": 0.9,
            "seed": number,
            **fields,
        }
        answer: dict[str, Any] = post(thinker, "/v1/messages", body).json()
        thinking, text = answer["content"]
        assert (thinking["type"], text["type"]) == ("thinking", "text"), answer
        assert 0 < len(TOKENIZER.encode(thinking["thinking"], False)) <= budget
        return answer

    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    with ThreadPoolExecutor(8) as pool:
        free = list(pool.map(ask, range(16)))
        schemas = list(pool.map(lambda number: ask(number, output_config=config), range(16)))
    ended = [answer for answer in schemas if answer["stop_reason"] == "end_turn"]
    assert len(ended) >= 8
    for answer in ended:
        Draft202012Validator(SCHEMA).validate(json.loads(answer["content"][1]["text"]))
    events = []
    body = {"max_tokens": 160, "messages": [{"role": "user", "content": "Tell me a story."}],
            "thinking": {"type": "enabled", "budget_tokens": 5}, "temperature": 0.9, "seed": 4,
            "stream": True}  # fmt: skip
    with httpx.stream("POST", f"{thinker.url}/v1/messages", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    for block, kind in zip(free[4]["content"], ("thinking", "text"), strict=True):
        assert block[kind] == "".join(delta.get(kind, "") for delta in deltas)
    assert requests_of(thinker) - before == 33
    check_idle(thinker)
