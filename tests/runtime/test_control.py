"""Operations that a Control message asks for: by name, with a body, answered or refused."""

from __future__ import annotations

import msgspec
import pytest

from radix_runtime.errors import RequestError
from radix_runtime.messages import Control, ControlReply, decode, encode, pack_body, unpack_body
from radix_runtime.scheduler.control import Operations
from tests.runtime.scheduler_rig import Rig


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
    reply = decode(encode(operations.answer(message)))
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
