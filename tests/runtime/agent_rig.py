"""What the tests of agents share: a server, a client, a tool, a conversation of three turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.runtime.scripted_server import ScriptedServer
from tests.runtime.tool_templates import HERMES

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITIES = {"Paris": "sunny", "Rome": "hot"}


def call_text(city: str) -> str:
    return (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    )


# Three turns: a thought and a call, another call, the answer.
TURNS = [
    f"<think>\nFirst Paris.\n</think>\n\nI look.\n{call_text('Paris')}",
    f"<think>\nNow Rome.\n</think>\n\n{call_text('Rome')}",
    "<think>\nI know.\n</think>\n\nParis is sunny and Rome is hot.",
]
FINAL = "Paris is sunny and Rome is hot."


def serve(folder: Path, api_key: str | None = "key") -> ScriptedServer:
    """A server that takes tools."""
    file = folder / "hermes.jinja"
    file.write_text(HERMES)
    return ScriptedServer(chat_template=str(file), api_key=api_key)


@contextmanager
def calling(server: ScriptedServer) -> Iterator[httpx.Client]:
    """A client of a server without a key, which has no answers yet and nothing open at the end."""
    server.answers.clear()
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client
    assert not server.manager._open


def saw_both_answers(server: ScriptedServer) -> bool:
    """The last prompt has every turn as the model wrote it, and what the tools said."""
    prompt = server.prompts[-1]
    return all(turn in prompt for turn in TURNS[:2]) and all(
        f"<tool_response>\n{text}\n" in prompt for text in CITIES.values()
    )
