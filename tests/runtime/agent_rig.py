"""What the tests of agents share: a server with a key, a tool, a conversation of three turns."""

from __future__ import annotations

from pathlib import Path

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


def serve(folder: Path) -> ScriptedServer:
    """A server that takes tools, with the key `key`."""
    file = folder / "hermes.jinja"
    file.write_text(HERMES)
    return ScriptedServer(chat_template=str(file), api_key="key")


def saw_both_answers(server: ScriptedServer) -> bool:
    """The last prompt has every turn as the model wrote it, and what the tools said."""
    prompt = server.prompts[-1]
    return all(turn in prompt for turn in TURNS[:2]) and all(
        f"<tool_response>\n{text}\n" in prompt for text in CITIES.values()
    )
