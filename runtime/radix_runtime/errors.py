"""Errors by who can mend them: the client, the operator, or nobody while the process runs."""

# Exit codes of the command and of the processes of a server.
EXIT_CLEAN = 0
EXIT_INTERNAL = 70
EXIT_HANG = 75
EXIT_CONFIG = 78

_ERROR_TYPES = {
    401: "authentication_error",
    403: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class RequestError(Exception):
    """A request that is refused or failed; becomes the HTTP error object as it stands.

    `status` is the HTTP status, `code` one of the stable strings of docs/serving.md, `param` the
    dotted path of the offending field or None, `retry_after` the seconds after which a 503 may
    succeed."""

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
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        """The error type in OpenAI's sense."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return _ERROR_TYPES.get(self.status, default)


def refusal(code: str, message: str, param: str | None = None) -> RequestError:
    """A request that is the client's mistake: status 400."""
    return RequestError(status=400, code=code, message=message, param=param)


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
    """The runtime is in a state that must not exist; `name` is the invariant's
    (scheduler/invariants.py)."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


def require(condition: bool, name: str, detail: str) -> None:
    """Raises InvariantViolation unless `condition` holds."""
    if not condition:
        raise InvariantViolation(name, detail)
