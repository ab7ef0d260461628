"""Engine.chat, Engine.async_generate and the bar of long calls."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from radix_runtime import Engine, SamplingParams
from radix_runtime.config import ServerArgs
from radix_runtime.errors import EngineDeadError
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.messages import Generate, pack_ids
from radix_runtime.offline_chat import ChatBuilder
from radix_runtime.text.answer_format import find_format
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.parity import engine
from tests.runtime.tool_templates import HERMES

GREEDY = {"temperature": 0}
SHORT = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
OTHER = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with engine(None) as e:
        yield e


def flushed(e: Engine) -> bool:
    """Whether nothing runs or waits any more."""
    return e.flush_cache()


# Conversations --------------------------------------------------------------------------------


def test_chat_answers_a_conversation_or_several(demo: Engine) -> None:
    one = demo.chat(SUM, GREEDY)
    assert "42" in one["text"]
    several = demo.chat([SUM, OTHER], [GREEDY, {**GREEDY, "max_new_tokens": 1}])
    assert len(several[1]["output_ids"]) == 1
    assert several[0]["output_ids"] == one["output_ids"]
    *_, last = demo.chat(SUM, GREEDY, stream=True)
    assert last["output_ids"] == one["output_ids"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 17 + 25?"}]}]
    assert demo.chat(parts, SamplingParams(temperature=0))["text"] == one["text"]


def test_a_chat_goes_to_the_end_of_the_context(demo: Engine) -> None:
    whole = demo.chat(SUM, {"temperature": 0, "ignore_eos": True})
    info = whole["meta_info"]
    assert info["prompt_tokens"] + info["completion_tokens"] == demo.executor.max_context


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ([], {}, "messages is empty|length >= 1"),
        ([{"role": "wizard", "content": "x"}], {}, "role must be one of"),
        ([{"role": "user", "content": "x", "colour": 1}], {}, "unknown parameter"),
        ([*SUM, {"role": "assistant", "content": "42"}], {}, "last message"),
        (["Hello"], {}, r"messages\[0\] is not a mapping"),
        (SUM, {"enable_thinking": True}, "chat template has no enable_thinking"),
    ],
)
def test_a_conversation_that_cannot_be_asked(
    demo: Engine, messages: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        demo.chat(messages, chat_template_kwargs=options)
    assert flushed(demo)


# Tools and reasoning --------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "get_weather"}}
ANSWER = (
    '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Paris"}}\n</tool_call>'
)


def test_an_answer_is_also_a_message(demo: Engine) -> None:
    whole = demo.chat(SUM, GREEDY)
    assert whole["message"] == {"role": "assistant", "content": whole["text"]}
    pair = demo.chat([SUM, OTHER], {**GREEDY, "n": 2})
    assert [o["message"]["content"] for o in pair] == [o["text"] for o in pair]
    *_, last = demo.chat(SUM, GREEDY, stream=True)
    assert last["message"] == whole["message"]
    with pytest.raises(ValueError, match="chat template of this model takes no tools"):
        demo.chat(SUM, tools=[TOOL])
    assert flushed(demo)


def test_tools_and_reasoning_of_an_engine(tmp_path: Path) -> None:
    """The prompt has the tools; an answer that grows is parsed as it grows."""
    file = tmp_path / "hermes.jinja"
    file.write_text(HERMES)
    tokenizer = load_tokenizer(DEMO_MODEL_DIR, str(file))
    chats = ChatBuilder(tokenizer, find_format(ServerArgs(), tokenizer))
    told: dict[str, Any] = {"tool_choice": None, "parallel_tool_calls": None, "continues": False}
    chat = chats.chat([SUM, OTHER], {}, tools=[TOOL], **told)
    assert all("get_weather" in tokenizer.decode(ids, False) for ids in chat.input_ids)
    params = chats.sampling(None, chat)
    requests = [_generate(str(i), ids, params) for i, ids in enumerate(chat.input_ids)]
    answers = chats.answers(chat, requests, "reasoning_content")
    grown = (
        {
            "index": choice,
            "text": ANSWER[:end],
            "meta_info": {"finish_reason": {"type": "stop"} if end == len(ANSWER) else None},
        }
        for end in range(1, len(ANSWER) + 1)
        for choice in (0, 1)
    )
    for output in answers.stream(grown):
        message = output["message"]
    (call,) = message["tool_calls"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    again = [*SUM, message, {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}]
    (ids,) = chats.chat([again], {}, tools=[TOOL], **told).input_ids
    assert ANSWER in tokenizer.decode(ids, False)
    for bad, error in (
        ({"tools": [TOOL, TOOL]}, "another tool"),
        ({"tools": [{"type": "function"}]}, "tools: "),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice must be"),
    ):
        with pytest.raises(ValueError, match=error):
            chats.chat([SUM], {}, **{**told, **bad})


def _generate(rid: str, ids: list[int], params: dict[str, Any]) -> Generate:
    sampling = SamplingParams(keep_special=params["keep_special"])
    return Generate(rid=rid, input_ids=pack_ids(ids), sampling=sampling)


# Coroutines -----------------------------------------------------------------------------------


def test_coroutines_run_side_by_side(demo: Engine) -> None:
    """More of them than any pool has threads, in steps that they share, with the same tokens."""
    prompts = [f"What is {i} + {i}?" for i in range(40)]
    alone = demo.generate(prompts, SHORT)
    assert flushed(demo)
    before = demo.get_server_info()["internal_states"][0]["steps_total"]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(demo.async_generate(text, SHORT) for text in prompts))

    together = asyncio.run(ask())
    assert [o["output_ids"] for o in together] == [o["output_ids"] for o in alone]
    steps = demo.get_server_info()["internal_states"][0]["steps_total"] - before
    assert steps < 40 * 6 / 2  # one after the other would take 40 times 6
    listed = asyncio.run(demo.async_generate(prompts[:2], {**SHORT, "n": 2}))
    assert len(listed) == 4 and "index" not in listed[0]
    assert flushed(demo)


def test_an_asynchronous_stream(demo: Engine) -> None:
    async def read() -> list[dict[str, Any]]:
        stream = await demo.async_generate("Hello", SHORT, stream=True)
        return [output async for output in stream]

    outputs = asyncio.run(read())
    assert outputs[-1]["output_ids"] == demo.generate("Hello", SHORT)["output_ids"]
    lengths = [len(output["output_ids"]) for output in outputs]
    assert lengths == sorted(lengths) and len(lengths) > 1
    assert outputs[-1]["meta_info"]["finish_reason"] and "index" not in outputs[-1]


def test_a_coroutine_that_is_cancelled_leaves_nothing(demo: Engine) -> None:
    async def leave() -> None:
        task = asyncio.create_task(demo.async_generate("Hello", LONG))
        stream: AsyncIterator[Any] = await demo.async_generate("Hello", LONG, stream=True)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def aborted() -> float:
        return demo.get_server_info()["internal_states"][0]["num_aborted_requests_total"]

    before = aborted()
    asyncio.run(leave())
    assert flushed(demo) and aborted() == before + 2
    assert not demo._open and not demo._watched


def test_a_coroutine_learns_of_bad_requests_and_of_the_end() -> None:
    with engine(None) as e:
        with pytest.raises(ValueError, match="temperature"):
            asyncio.run(e.async_generate("Hello", {"temperature": -1}))

        async def outlive() -> None:
            task = asyncio.create_task(e.async_generate("Hello", LONG))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(e.shutdown)
            with pytest.raises(EngineDeadError):
                await task

        asyncio.run(outlive())
        with pytest.raises(EngineDeadError):
            asyncio.run(e.async_generate("Hello"))


# The bar --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_where_it_is_asked_for_and_on_a_terminal(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream, asked, shown in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        demo.generate(["a", "b", "c"], SHORT, use_tqdm=asked)
        demo.chat([SUM, OTHER], SHORT, use_tqdm=asked)
        assert ("prompts: 100%" in stream.getvalue()) == shown
        assert ("3/3" in stream.getvalue() and "2/2" in stream.getvalue()) == shown
