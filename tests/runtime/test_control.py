"""Operations that a Control message asks for: by name, with a body, answered or refused."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import pytest

from radix_runtime.errors import EngineCommandError, EngineDeadError, RequestError
from radix_runtime.messages import Control, ControlReply, decode, encode, pack_body, unpack_body
from radix_runtime.scheduler.control import Operations
from radix_runtime.step_plan import EngineCommand, Profile
from tests.runtime.scheduler_rig import Rig, prompt

START = Profile(action="start", directory="/traces")


class Adapter(msgspec.Struct):
    name: str
    rank: int = 8


def load(body: msgspec.Raw) -> dict[str, int]:
    adapter = unpack_body(body, Adapter)
    if adapter.rank > 64:
        raise RequestError(status=409, code="too_large", message="no room")
    return {adapter.name: adapter.rank}


@pytest.fixture
def operations() -> Operations:
    operations = Operations()
    operations.register("load", load)
    return operations


def ask(operations: Operations, op: str, body: object = None) -> ControlReply:
    """As over a link: both messages are encoded and decoded."""
    message = decode(encode(Control(7, op, body=pack_body(body))))
    assert isinstance(message, Control)
    answer = operations.answer(message)
    assert answer is not None
    reply = decode(encode(answer))
    assert isinstance(reply, ControlReply) and reply.id == 7
    return reply


def test_an_operation_gets_its_body_and_gives_a_result(operations: Operations) -> None:
    reply = ask(operations, "load", Adapter("a", rank=4))
    assert reply.result(dict[str, int]) == {"a": 4}
    with pytest.raises(msgspec.DecodeError):
        reply.result(bool)


@pytest.mark.parametrize(
    ("op", "body", "status", "code"),
    [
        ("unload", None, 400, "unknown_operation"),
        ("load", {"rank": "x"}, 400, "invalid_value"),
        ("load", None, 400, "invalid_value"),
        ("load", Adapter("a", rank=65), 409, "too_large"),
    ],
)
def test_what_cannot_be_done_is_an_error(
    operations: Operations, op: str, body: object, status: int, code: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(operations, op, body).result(bool)
    assert (caught.value.status, caught.value.code) == (status, code)


def test_a_name_belongs_to_one_operation(operations: Operations) -> None:
    with pytest.raises(ValueError, match="load"):
        operations.register("load", load)


def test_the_scheduler_answers_by_name() -> None:
    rig = Rig()
    assert rig.ask("flush_cache").result(bool) is True
    with pytest.raises(RequestError, match="no operation 'nonsense'"):
        rig.ask("nonsense").result(bool)
    rig.scheduler.operations.register("sum", lambda body: sum(unpack_body(body, list[int])))
    assert rig.ask("sum", [1, 2, 3]).result(int) == 6


# Commands that the scheduler passes to its engine ---------------------------------------------


def test_the_engine_gets_a_command_behind_the_steps_launched_before_it() -> None:
    rig = Rig()
    rig.submit("a", prompt(10), max_new_tokens=5, ignore_eos=True)
    rig.step()
    assert not rig.engine.results
    rig.inbox.send(Control(id=0, op="engine", body=pack_body(START)))
    rig.step()
    rig.step()
    assert rig.engine.commands == [START]
    assert [reply.result(list[str]) for reply in rig.replies] == [["done"]]
    rig.run()
    rig.verify_all()


def test_a_command_that_fails_is_answered_and_serving_goes_on() -> None:
    rig = Rig()
    rig.engine.command_error = EngineCommandError(1, "no such folder")
    rig.submit("a", prompt(10), max_new_tokens=5)
    reply = rig.ask("engine", START)
    with pytest.raises(RequestError, match="rank 1: no such folder") as caught:
        reply.result(list[str])
    assert (caught.value.status, caught.value.code) == (500, "engine_command_failed")
    rig.run()
    rig.verify_all()


def test_a_dead_engine_is_no_answer() -> None:
    rig = Rig()
    rig.engine.command_error = EngineDeadError("gone")
    rig.inbox.send(Control(id=0, op="engine", body=pack_body(START)))
    with pytest.raises(EngineDeadError):
        rig.run(2)


def test_answers_come_in_the_order_of_the_commands_while_the_loop_looks_often() -> None:
    rig = Rig(check="off")
    futures: list[Future[list[str]]] = []

    def call(command: EngineCommand) -> Future[list[str]]:
        futures.append(Future())
        return futures[-1]

    rig.engine.call = call  # type: ignore[method-assign]
    for number in range(2):
        rig.inbox.send(Control(id=number, op="engine", body=pack_body(START)))
    rig.step()
    futures[1].set_result(["late"])
    rig.step()
    assert not rig.replies
    waits: list[float | None] = []

    def wait(timeout: float | None) -> bool:
        waits.append(timeout)
        if len(waits) == 2:
            futures[0].set_result(["early"])
        return False

    rig.inbox.wait = wait  # type: ignore[method-assign]
    rig.scheduler.run(lambda: len(waits) > 2)
    rig.step()
    assert waits == [0.005, 0.005, 1.0]
    assert [reply.result(list[str]) for reply in rig.replies] == [["early"], ["late"]]


@pytest.mark.parametrize("body", [None, {"type": "Profile", "action": "begin"}])
def test_a_command_that_is_none_is_refused(body: object) -> None:
    rig = Rig()
    with pytest.raises(RequestError) as caught:
        rig.ask("engine", body).result(list[str])
    assert caught.value.code == "invalid_value"
    assert not rig.engine.commands
