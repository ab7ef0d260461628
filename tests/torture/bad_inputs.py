"""What a server must refuse quickly, whatever it looks like: docs/reliability.md has the table."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
TIMEOUT = 60.0  # seconds for one answer
_EIGHT_MB = 8_000_000

# Harmless unless the user says otherwise.
TEMPLATE = """{%- for message in messages %}{{ message.content }}{% endfor %}
{%- if 'loop' in messages[0].content %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif 'eat' in messages[0].content %}{{ '%1000000000d' % messages|length }}{% endif %}"""


@dataclass(frozen=True)
class BadInput:
    """A request, and how it is refused. `kills_template`: each costs a process that renders
    conversations; after three in a row the server gives its template up."""

    name: str
    path: str
    body: bytes
    status: int
    code: str
    headers: tuple[tuple[str, str], ...] = ()
    kills_template: bool = False

    def raw(self, host: str) -> bytes:
        """The request as bytes of HTTP/1.1; `host` is what it calls unless it gives another."""
        headers = {"host": host, "connection": "close", "content-type": "application/json"}
        headers |= {"content-length": str(len(self.body)), **dict(self.headers)}
        lines = [f"POST {self.path} HTTP/1.1", *[f"{k}: {v}" for k, v in headers.items()]]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def answer_of(port: int, data: bytes) -> bytes:
    """All that a server of this machine answers to a request that asks it to close then."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as connection:
        connection.sendall(data)
        while more := connection.recv(1 << 16):
            answer += more
    return answer


def chat(text: str) -> dict[str, Any]:
    """The body of a short conversation."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


def _chat(text: str) -> bytes:
    return json.dumps(chat(text)).encode()


def bad_inputs(context: int) -> list[BadInput]:
    """All of them, for a model of this context; the last two need a server with `TEMPLATE`."""
    scores = {
        "input_ids": [[5] * (context - 8)] * 256,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 20,
        "sampling_params": {"max_new_tokens": 1},
    }
    return [
        BadInput(
            name="65 KB of nested malformed JSON",
            path=CHAT,
            body=b'{"a":' + b"[" * 900 + b"1," * 31_800 + b"1" + b"]" * 900 + b',"b":"\\ud800"}',
            status=400,
            code="invalid_json",
        ),
        BadInput(
            name="8 MB of small arrays",
            path=COMPLETIONS,
            body=b'{"prompt":[' + b"[5]," * (_EIGHT_MB // 4) + b"[5]]}",
            status=400,
            code="invalid_json",
        ),
        BadInput(
            name="8 MB of small objects",
            path=COMPLETIONS,
            body=b'{"prompt":"x","user":[' + b"{}," * (_EIGHT_MB // 3) + b"{}]}",
            status=400,
            code="invalid_json",
        ),
        BadInput(
            name="a number of 400 digits",
            path=CHAT,
            body=_chat("x")[:-2] + b"9" * 400 + b"}",
            status=400,
            code="invalid_json",
        ),
        BadInput(
            name="an answer over the bound",
            path=GENERATE,
            body=json.dumps(scores).encode(),
            status=400,
            code="invalid_value",
        ),
        BadInput(
            name="an unknown Host",
            path=CHAT,
            body=_chat("x"),
            status=403,
            code="host_not_allowed",
            headers=(("host", "evil.example"),),
        ),
        BadInput(
            name="a foreign Origin",
            path=CHAT,
            body=_chat("x"),
            status=403,
            code="origin_not_allowed",
            headers=(("origin", "http://evil.example"),),
        ),
        BadInput(
            name="a template that loops",
            path=CHAT,
            body=_chat("loop"),
            status=400,
            code="template_failed",
            kills_template=True,
        ),
        BadInput(
            name="a template that allocates",
            path=CHAT,
            body=_chat("eat"),
            status=400,
            code="template_failed",
            kills_template=True,
        ),
    ]
