"""The processes of an instance: what each kind does, where its messages go, what its exit means.

To add a kind of process, add a `Role` to the table: links, heartbeats, titles and restarts follow.
"""

from collections.abc import Sequence

import msgspec

from ..messages import MESSAGE_TYPES

API = "api"
SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"
SUPERVISOR = "supervisor"  # sends ProcessDown and ProcessUp; gets nothing


class Role(msgspec.Struct, frozen=True):
    """A kind of process. `module` has `serve(child: Child)`, which is its work; `sends` says which
    role gets its messages, by the name of their type.

    `serves_http`: it gets the listening socket and the supervisor's commands; exactly one role
    does. `restartable`: it is restarted when it dies while the instance serves, and its peers are
    notified; the exit of any other process ends the instance."""

    name: str
    module: str
    sends: dict[str, str]
    instances: int = 1
    serves_http: bool = False
    restartable: bool = False


# In the order in which they are started.
ROLES = (
    Role(
        name=DETOKENIZER,
        module="radix_runtime.processes.detokenizer",
        sends={"TextStop": SCHEDULER, "TextBatch": API, "RequestFailed": API},
    ),
    Role(
        name=SCHEDULER,
        module="radix_runtime.processes.scheduler",
        sends={"TokenBatch": DETOKENIZER, "RequestFailed": DETOKENIZER, "ControlReply": API},
    ),
    Role(
        name=API,
        module="radix_runtime.processes.api",
        sends={"Generate": SCHEDULER, "Abort": SCHEDULER, "Control": SCHEDULER},
        serves_http=True,
    ),
)


def serving_roles(api_processes: int = 1) -> tuple[Role, ...]:
    """The roles of an instance with so many API processes; several of them talk to each other."""
    if api_processes == 1:
        return ROLES
    return tuple(_replicated(role, api_processes) if role.name == API else role for role in ROLES)


def _replicated(api: Role, count: int) -> Role:
    sends = {**api.sends, "SiblingCall": API, "SiblingReply": API}
    return msgspec.structs.replace(api, instances=count, sends=sends)


def process_id(role: str, instance: int = 0) -> str:
    """The name of one process: "scheduler/0"."""
    return f"{role}/{instance}"


class Topology:
    """Who there is in an instance, and who sends to whom. Every process of an instance has the same
    one. Raises ValueError on roles that do not fit together.

    `roles` are by name; `processes` are the ids of all, in the order of their start."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self.roles = {role.name: role for role in roles}
        if len(self.roles) < len(roles) or SUPERVISOR in self.roles:
            raise ValueError("each role needs a name of its own")
        self.processes = [
            process_id(role.name, instance) for role in roles for instance in range(role.instances)
        ]
        for role in roles:
            unknown = role.sends.keys() - MESSAGE_TYPES or set(role.sends.values()) - set(
                self.roles
            )
            if unknown:
                raise ValueError(f"role {role.name} sends {', '.join(sorted(unknown))}: unknown")
            if role.serves_http and role.restartable:  # its socket is gone with it
                raise ValueError(f"role {role.name} serves HTTP and cannot be restarted")

    def role(self, process: str) -> Role:
        """The role of a process."""
        return self.roles[process.rpartition("/")[0]]

    def instances(self, role: str) -> list[str]:
        """The processes of a role."""
        return [process_id(role, instance) for instance in range(self.roles[role].instances)]

    def label(self, process: str) -> str:
        """How logs and `ps` call a process: its role, and its number if there are several."""
        role = self.role(process)
        return process if role.instances > 1 else role.name

    def everybody(self) -> list[str]:
        """All processes, then the supervisor: who sends messages, and whose heart beats."""
        return [*self.processes, process_id(SUPERVISOR)]

    def peers(self, process: str) -> list[str]:
        """The other processes that send to this one or get something from it."""
        own = self.role(process)
        found = []
        for other in self.processes:
            role = self.role(other)
            linked = role.name in own.sends.values() or own.name in role.sends.values()
            if linked and other != process:
                found.append(other)
        return found
