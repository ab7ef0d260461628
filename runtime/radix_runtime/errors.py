"""Errors that cross a room: what a client did wrong, what the operator did wrong, what broke."""

EXIT_CLEAN = 0
EXIT_INTERNAL = 70
EXIT_HANG = 75
EXIT_CONFIG = 78

_TYPES = {
    401: "authentication",
    403: "authentication",
    404: "not_found",
    429: "rate_limit",
    503: "overloaded",
}


class RequestError(Exception):
    """A request that is refused or failed; becomes the HTTP error object as it stands.

    `status` is the HTTP status, `code` one of the stable strings of docs/serving.md, `param` the
    dotted path of the offending field or None, `type` the OpenAI error type, `retry_after` seconds
    for 503."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after = param, retry_after
        self.type = _TYPES.get(status, "server" if status >= 500 else "invalid_request") + "_error"


def refusal(code: str, message: str, param: str | None = None) -> RequestError:
    """The client's mistake: status 400."""
    return RequestError(400, code, message, param=param)


class ConfigError(Exception):
    """The operator's configuration cannot work. One line, exit code 78, no traceback."""


class EngineDeadError(RuntimeError):
    """The engine has died; nothing more can be served by this instance."""


class EngineCommandError(RuntimeError):
    """A command to the engine failed on `rank`; the engine goes on serving."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        self.message = message


class MaskError(RuntimeError):
    """The masks of a step did not come, or do not fit it. The step has sampled nothing: its
    requests cannot go on, the engine can."""

    def __init__(self, step_id: int, reason: str) -> None:
        super().__init__(f"masks of step {step_id}: {reason}")
        self.step_id = step_id


class InvariantViolation(AssertionError):
    """The runtime caught itself in a state that must not exist (see scheduler/invariants.py)."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


def require(condition: bool, name: str, detail: str) -> None:
    if not condition:
        raise InvariantViolation(name, detail)
