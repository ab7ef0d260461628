"""The bounds of the queue: what is refused before it is tokenized, and what never is."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from radix_runtime.config import ServerArgs
from radix_runtime.errors import RequestError
from radix_runtime.messages import Generate, pack_ids
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.server.admission import Admission, Place, Speed
from radix_runtime.server.shared_numbers import SharedNumbers
from tests.runtime.api_stack import LONG, Stack, in_background


def generate(prompt: int, n: int = 1, new: int = 10) -> Generate:
    sampling = SamplingParams(n=n, max_new_tokens=new)
    return Generate(rid="r", input_ids=pack_ids([5] * prompt), sampling=sampling)


def entered(admission: Admission, requests: list[Generate], size: int = 100) -> Place:
    place = admission.enter(size)
    place.admit(requests)
    return place


def refused(admission: Admission, requests: list[Generate], size: int = 100) -> RequestError:
    before = (admission.bytes, admission.choices)
    with pytest.raises(RequestError) as caught, admission.enter(size) as place:
        place.admit(requests)
    assert (admission.bytes, admission.choices) == before
    return caught.value


def test_a_count_bounds_the_queue_only_where_it_is_given() -> None:
    counted = Admission(ServerArgs(max_running_requests=2, max_queued_requests=3), SharedNumbers())
    free = Admission(ServerArgs(max_running_requests=2), SharedNumbers())
    places = [entered(counted, [generate(4, n=4)])]
    assert refused(counted, [generate(4, n=2)]).status == 503
    places.append(entered(counted, [generate(4)]))
    assert refused(counted, [generate(4)]).code == "engine_overloaded"
    places.pop().__exit__()
    places.append(entered(counted, [generate(4)]))
    assert refused(counted, [generate(4, n=6)]).status == 503  # full, whatever comes
    for place in places:
        place.__exit__()
    assert (counted.bytes, counted.choices) == (0, 0)
    assert refused(counted, [generate(4, n=6)]).status == 400  # and never fits
    for _ in range(5000):
        entered(free, [generate(4)])
    assert free.choices == 5000


def test_bytes_bound_the_queue() -> None:
    admission = Admission(ServerArgs(max_queue_bytes=4 << 20), SharedNumbers())
    alone = entered(admission, [generate(1000)], size=5 << 20)  # nobody else is there
    error = refused(admission, [generate(4)])
    assert error.status == 503 and str(4 << 20) in error.message
    alone.__exit__()
    held = [entered(admission, [generate(1000)]) for _ in range(150)]
    assert refused(admission, [generate(100_000, n=8)]).status == 503  # known when tokenized
    assert 150 * 4000 < admission.bytes < 4 << 20
    for place in held:
        place.__exit__()
    assert admission.bytes == 0


def test_seconds_of_work_bound_the_queue() -> None:
    admission = Admission(ServerArgs(max_queue_seconds=10), SharedNumbers())
    admission.waiting_tokens = 10**9
    admission.check()  # nothing is known of the speed
    admission.speed.begin(100.0)
    for second in range(101, 111):
        admission.speed.note(1000, float(second))
    admission.waiting_tokens = 9_900
    assert admission.seconds == pytest.approx(9.9, rel=0.2)
    admission.waiting_tokens = 15_000
    with pytest.raises(RequestError) as caught:
        admission.check()
    assert caught.value.status == 503 and 10 <= (caught.value.retry_after or 0) <= 20


def test_time_without_work_does_not_count_and_old_work_fades() -> None:
    speed = Speed()
    speed.begin(0.0)
    for second in range(1, 11):
        speed.note(1000, float(second))
    before = speed.seconds(1000)
    speed.end()
    speed.begin(10_000.0)
    assert speed.seconds(1000) == before
    for second in range(10_001, 10_201):
        speed.note(10, float(second))
    assert speed.seconds(1000) == pytest.approx(100, rel=0.1)


def test_expected_work_learns_the_length_of_answers() -> None:
    speed = Speed()
    assert speed.expected(generate(7, n=2, new=1000)) == 7 + 2 * 1000
    for _ in range(500):
        speed.note_answer(20)
    assert speed.expected(generate(7, n=2, new=1000)) == 7 + 2 * 20
    assert speed.expected(generate(7, new=3)) == 7 + 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_refusal_is_told_before_the_body_is_read(path: str) -> None:
    """Neither the body's mistakes nor its text matter then, and the engine hears nothing."""
    with Stack(max_queued_requests=0, pages=256) as stack:
        stack.running.clear()
        body = {**LONG, "prompt": ["a"] * 8, "max_tokens": 20}
        url = f"{stack.url}/v1/completions"
        thread, taken = in_background(lambda: httpx.post(url, json=body, timeout=20))
        stack.wait(lambda: stack.manager.admission.choices == 8)
        stack.wait(lambda: len(stack.sent_of(Generate)) == 8)
        for content in (b'{"no": "such field"}', b"x" * 1_000_000, b""):
            headers = {"content-type": "application/json"}
            answer = httpx.post(stack.url + path, content=content, headers=headers, timeout=20)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                503,
                "engine_overloaded",
            )
            assert int(answer.headers["retry-after"]) >= 1
        assert httpx.post(f"{stack.url}/tokenize", json={"prompt": "a"}).status_code == 200
        for probe in ("/health", "/ready", "/metrics"):
            assert httpx.get(stack.url + probe).status_code == 200
        assert len(stack.sent_of(Generate)) == 8
        stack.running.set()
        thread.join(20)
        assert taken[0].status_code == 200
        stack.check_idle()
        stack.wait(lambda: stack.manager.admission.choices == 0)
        assert stack.manager.admission.bytes == 0


def test_a_burst_of_a_thousand_requests_is_served() -> None:
    with Stack(pages=512) as stack:
        body: dict[str, Any] = {"prompt": ["a b c"] * 250, "max_tokens": 2, "ignore_eos": True}
        calls = [
            in_background(lambda: httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60))
            for _ in range(4)
        ]
        for thread, result in calls:
            thread.join(60)
            assert result[0].status_code == 200 and len(result[0].json()["choices"]) == 250
        stack.check_idle()
        assert stack.manager.admission.waiting_tokens == 0


def test_metrics_tell_the_time_in_the_queue(slow: Stack) -> None:
    url = f"{slow.url}/v1/completions"
    body = {"prompt": ["a"] * 24, "max_tokens": 5, "ignore_eos": True}  # 8 run at a time
    assert httpx.post(url, json=body, timeout=20).status_code == 200
    text = httpx.get(f"{slow.url}/metrics").text

    def figure(name: str) -> float:
        found = re.search(rf"^radix:{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    assert figure("request_queue_time_seconds_count") == 24
    assert figure("request_queue_time_seconds_sum") > 8 * 5 * 0.02  # the second eight waited
    assert figure("queue_bytes") == figure("queue_estimated_seconds") == 0
