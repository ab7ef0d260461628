"""`--skip-tokenizer-init`: a server, and an Engine, of token ids alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radix_runtime import Engine
from radix_runtime.config import ServerArgs
from radix_runtime.errors import ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR
from tests.runtime.api_stack import Stack, events
from tests.runtime.server_process import Server

IDS = [5, 6, 7]
PARAMS = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def ids_client() -> Iterator[httpx.Client]:
    with Stack(skip_tokenizer_init=True) as stack, httpx.Client(base_url=stack.url) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_ids_in_and_ids_out(ids_client: httpx.Client, stream: bool) -> None:
    body = {"input_ids": IDS, "sampling_params": PARAMS, "stream": stream, "return_logprob": True}
    answer = ids_client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    out = events(answer.text)[-1] if stream else answer.json()
    assert len(out["output_ids"]) == 4 and out["text"] == ""
    assert [token for _, token, _ in out["meta_info"]["output_token_logprobs"]] == out["output_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None),
        ("/v1/completions", {"prompt": "a"}, None),
        ("/v1/completions", {"prompt": IDS}, None),  # its answer would be text
        ("/generate", {"text": "a"}, None),
        ("/generate", {"input_ids": IDS, "sampling_params": {"stop": ["a"]}},
         "sampling_params.stop"),
        ("/generate", {"input_ids": IDS, "return_logprob": True, "return_text_in_logprobs": True},
         None),
        ("/tokenize", {"prompt": "a"}, None),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, None),
        ("/detokenize", {"tokens": IDS}, None),
    ],
)  # fmt: skip
def test_text_is_refused_with_the_way_out(
    ids_client: httpx.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = ids_client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("no_tokenizer", param)
    assert "/generate with input_ids" in error["message"]


def test_what_needs_no_text_answers(ids_client: httpx.Client) -> None:
    assert ids_client.get("/model_info").json()["has_chat_template"] is False
    for path in ("/health_generate", "/v1/models", "/server_info", "/metrics"):
        assert ids_client.get(path).status_code == 200


@pytest.fixture
def without_tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "plain-model"
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    return folder


def test_a_server_of_a_model_without_a_tokenizer(without_tokenizer: Path) -> None:
    with Server(str(without_tokenizer), "--skip-tokenizer-init") as server:
        body = {"input_ids": IDS, "sampling_params": PARAMS}
        out = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
        assert len(out["output_ids"]) == 4
        assert "token ids only, by /generate" in server.log()
        # Its name is the directory's; its path is taken for it.
        names = [m["id"] for m in httpx.get(f"{server.url}/v1/models").json()["data"]]
        assert names == ["plain-model"]
        for name, status in ((f"{without_tokenizer}/", 200), ("plain-model", 200), ("other", 404)):
            answer = httpx.get(f"{server.url}/v1/models/{name}")
            assert answer.status_code == status, name


def test_an_engine_may_leave_the_tokenizer_out() -> None:
    with Engine(
        skip_tokenizer_init=True, max_total_tokens=256, num_threads=1, device="cpu"
    ) as engine:
        out = engine.generate(input_ids=IDS, sampling_params=PARAMS)
        assert len(out["output_ids"]) == 4 and out["text"] == ""
        with pytest.raises(ValueError, match="pass input_ids"):
            engine.generate("Hello")
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            engine.generate(input_ids=IDS, sampling_params={"stop": ["a"]})


def test_it_excludes_what_needs_one() -> None:
    for other in ({"tokenizer_path": "x"}, {"chat_template": "x"}):
        with pytest.raises(ConfigError, match="--skip-tokenizer-init excludes"):
            ServerArgs(skip_tokenizer_init=True, **other).validate()
