"""The table of roles, several instances of one, and links over a restart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radix_runtime.messages import Control, ControlReply, ProcessDown, ProcessUp, encode
from radix_runtime.processes import ipc
from radix_runtime.processes.roles import ROLES, Role, Topology
from tests.runtime.net import API, DETOKENIZER, SCHEDULER, Net, generate, open_net, take

TOY = "toy/0"
SUPERVISOR = "supervisor/0"

# A second scheduler, which the API may choose, and a process that may be started again.
MORE_ROLES = (
    Role(name="scheduler", module="", sends={"ControlReply": "api"}, instances=2),
    Role(name="toy", module="", sends={"ControlReply": "api"}, restartable=True),
    Role(name="api", module="", sends={"Generate": "scheduler", "Control": "toy"}),
)


@pytest.fixture
def net() -> Iterator[Net]:
    with open_net() as net:
        net.topology = Topology(MORE_ROLES)
        yield net


def test_each_instance_of_a_role_has_its_own_link(net: Net) -> None:
    first = net.receiver("scheduler/0")
    second = net.receiver("scheduler/1")
    net.receiver(TOY)
    at_api = net.receiver(API)
    api = net.sender(API)
    for i in range(6):
        api.send(generate(i), instance=i % 2)
    assert take(first, 3) == [generate(0), generate(2), generate(4)]
    assert take(second, 3) == [generate(1), generate(3), generate(5)]
    for number, process in enumerate(("scheduler/0", "scheduler/1")):
        net.sender(process).send(ControlReply(number))
    answers = take(at_api, 2)
    assert {reply.id for reply in answers if isinstance(reply, ControlReply)} == {0, 1}


def test_a_process_that_was_started_again(net: Net) -> None:
    """Both directions begin anew; what was on its way to or from the dead one reaches nobody."""
    supervisor = ipc.Announcer(net.node(SUPERVISOR))
    api = net.sender(API)
    at_api = net.receiver(API, api)
    dead = net.receiver(TOY)
    of_dead = net.sender(TOY)
    net.receiver("scheduler/0")
    net.receiver("scheduler/1")
    api.wait_connected(30)
    for i in range(3):
        api.send(Control(i, "x"))
    assert len(take(dead, 3)) == 3
    of_dead.send(ControlReply(0))
    assert take(at_api, 1) == [ControlReply(0)]
    api.send(Control(3, "x"))  # never read

    dead._socket.close(0)
    supervisor.tell(API, ProcessDown(TOY))
    assert take(at_api, 1) == [ProcessDown(TOY)]
    with pytest.raises(ipc.ProcessUnavailable, match="toy/0"):
        api.send(Control(4, "x"))
    assert not api.try_send(Control(4, "x"))

    net.generations = {TOY: 1}
    new = net.receiver(TOY)
    stale = net.raw(TOY)
    stale.send(net.frame(API, 4, encode(Control(4, "stale"))))
    assert new.wait(30) and new.receive() == []
    supervisor.tell(API, ProcessUp(TOY, 1))
    assert take(at_api, 1) == [ProcessUp(TOY, 1)]
    api.send(Control(5, "x"))
    api.send(Control(6, "x"))
    assert take(new, 2) == [Control(5, "x"), Control(6, "x")]

    of_new = net.sender(TOY)
    of_new.send(ControlReply(5))
    assert take(at_api, 1) == [ControlReply(5)]
    of_dead.send(ControlReply(1))  # it comes late
    of_new.send(ControlReply(6))
    assert take(at_api, 1) == [ControlReply(6)]
    supervisor.tell(API, ProcessUp(TOY, 1))  # known
    assert take(at_api, 1) == [ProcessUp(TOY, 1)]
    api.send(Control(7, "x"))
    assert take(new, 1) == [Control(7, "x")]
    stale.close()


@pytest.mark.parametrize(
    "roles",
    [
        [*ROLES, ROLES[0]],
        [Role(name="a", module="", sends={"NoMessage": "a"})],
        [Role(name="a", module="", sends={"Abort": "b"})],
        [Role(name="supervisor", module="", sends={})],
        [Role(name="a", module="", sends={}, serves_http=True, restartable=True)],
    ],
)
def test_roles_that_do_not_fit_together(roles: list[Role]) -> None:
    with pytest.raises(ValueError):
        Topology(roles)


def test_who_has_links_with_whom() -> None:
    assert Topology(ROLES).peers(API) == [DETOKENIZER, SCHEDULER]
    topology = Topology(MORE_ROLES)
    assert topology.peers(TOY) == [API]
    assert topology.peers("scheduler/1") == [API]
    assert topology.label("scheduler/1") == "scheduler/1" and topology.label(TOY) == "toy"
