"""Control messages: operations on the scheduler, and commands that it passes to the engine."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import pytest

from radix_runtime.errors import EngineCommandError, EngineDeadError
from radix_runtime.messages import Control, ControlReply, decode, encode
from radix_runtime.step_plan import EngineCommand, Profile
from tests.runtime.scheduler_rig import Rig, prompt

START = Profile(action="start", directory="/traces")


def test_a_command_travels_in_a_control_message() -> None:
    message = Control(id=3, op="engine", body=START)
    assert decode(encode(message)) == message
    with pytest.raises(msgspec.ValidationError):
        decode(encode(message).replace(b"start", b"begin"))


def test_the_engine_gets_a_command_behind_the_steps_launched_before_it() -> None:
    rig = Rig()
    rig.submit("a", prompt(10), max_new_tokens=5, ignore_eos=True)
    rig.step()
    assert not rig.engine.results
    rig.inbox.send(Control(id=0, op="engine", body=START))
    rig.step()
    assert rig.engine.commands == [START]
    assert rig.replies == [ControlReply(id=0, ok=True, answers=["done"])]
    rig.run()
    rig.verify_all()


def test_a_command_that_fails_is_answered_and_serving_goes_on() -> None:
    rig = Rig()
    rig.engine.command_error = EngineCommandError(1, "no such folder")
    rig.submit("a", prompt(10), max_new_tokens=5)
    reply = rig.control("engine", START)
    assert (reply.ok, reply.answers, reply.error) == (False, [], "rank 1: no such folder")
    rig.run()
    rig.verify_all()


def test_a_dead_engine_is_no_answer() -> None:
    rig = Rig()
    rig.engine.command_error = EngineDeadError("gone")
    rig.inbox.send(Control(id=0, op="engine", body=START))
    with pytest.raises(EngineDeadError):
        rig.step()


def test_answers_come_in_the_order_of_the_commands_while_the_loop_looks_often() -> None:
    rig = Rig(check="off")
    futures: list[Future[list[str]]] = []

    def call(command: EngineCommand) -> Future[list[str]]:
        futures.append(Future())
        return futures[-1]

    rig.engine.call = call  # type: ignore[method-assign]
    for number in range(2):
        rig.inbox.send(Control(id=number, op="engine", body=START))
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
    assert [reply.answers for reply in rig.replies] == [["early"], ["late"]]


def test_a_command_without_a_body_is_refused() -> None:
    rig = Rig()
    reply = rig.control("engine")
    assert (reply.ok, reply.error) == (False, "there is no command")
    assert not rig.engine.commands
