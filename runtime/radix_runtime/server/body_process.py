"""The process that decodes large request bodies for the API process (body_decoder.py)."""

import os
import sys
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from ..errors import RequestError, refusal
from ..messages import Generate, pack_ids, unpack_ids
from ..sampling_params import MAX_ENTRIES
from . import protocol
from .body_decoder import Decoded, Job
from .decode import decode_body
from .helper_process import read_frame, write_frame
from .logprob_bound import check_logprobs
from .prompt_requests import completion_requests, generate_requests
from .protocol import MAX_PROMPTS, CompletionBody, GenerateBody

_ID_FIELDS = ("prompt", "input_ids", "tokens")
_MAX_ENTRIES = max(MAX_ENTRIES.values())
_NICENESS = 5  # on few cores, running requests come before large bodies
_LARGEST_ID = (1 << 31) - 1


def main() -> None:
    """Answers frame by frame until the API process has gone."""
    os.nice(_NICENESS)
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # a normal exit would complain of what nobody reads any more


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    while True:
        head, data = read_frame(requests)
        job = msgspec.msgpack.decode(head, type=Job)
        try:
            answer, packed = decode_packed(job, data)
        except RequestError as error:
            answer = Decoded(
                error={
                    "status": error.status,
                    "code": error.code,
                    "message": error.message,
                    "param": error.param,
                }
            )
            packed = b""
        write_frame(answers, msgspec.msgpack.encode(answer), packed)


def decode_packed(job: Job, data: bytes) -> tuple[Decoded, bytes]:
    """The frame that answers a job. Raises RequestError 400."""
    kind = getattr(protocol, job.kind)
    body, warnings = decode_body(kind, data, job.lenient, job.rules.defaults)
    answer = Decoded(warnings=warnings)
    for name in _ID_FIELDS:
        _pack_field(body, name, answer)
    _check_entries(body)
    _check_logprobs(job, body, answer)
    try:
        return answer, msgspec.msgpack.encode(body)
    except OverflowError:
        raise refusal("invalid_value", "an integer does not fit 64 bits") from None


def _pack_field(body: msgspec.Struct, name: str, answer: Decoded) -> None:
    """Moves the token ids of a field, if it has some, into `answer`."""
    value = getattr(body, name, None)
    if not isinstance(value, list):
        return
    kinds = {type(item) for item in value}
    if kinds == {int}:
        answer.ids = [_pack(value)]
    elif kinds == {list}:
        if len(value) > MAX_PROMPTS:  # each would be an array in the API process
            raise refusal("invalid_value", f"at most {MAX_PROMPTS} prompts", name)
        answer.ids = [_pack(ids) for ids in value]
        answer.is_listed = True
    else:
        return
    answer.ids_field = name
    setattr(body, name, [0])


def _check_logprobs(job: Job, body: msgspec.Struct, answer: Decoded) -> None:
    """Raises what the API process would of an answer that would be too large, before the ids are
    copied there. Raises RequestError 400."""
    if not answer.ids:
        return
    prompts = [unpack_ids(ids) for ids in answer.ids]
    requests: Iterator[Generate]
    if isinstance(body, GenerateBody) and body.return_logprob and body.text is None:
        requests = generate_requests(job.rules, body, prompts, answer.ids_field)
    elif isinstance(body, CompletionBody) and (
        body.logprobs is not None or body.prompt_logprobs is not None
    ):
        requests = completion_requests(job.rules, body, prompts)
    else:
        return
    for ids in prompts:
        job.rules.limits.check_ids(ids, answer.ids_field)
    check_logprobs(requests, job.most_logprobs)


def _check_entries(body: msgspec.Struct) -> None:
    """Raises RequestError 400 for lists that no request may have, which would take the API process
    long to read. Messages are bounded by their type, and by the number of objects in a body."""
    names = zip(body.__struct_fields__, body.__struct_encode_fields__, strict=True)
    for field, name in names:
        value = getattr(body, field)
        if name in ("messages", "input") or not isinstance(value, list | dict):
            continue
        parts = [item for item in value if isinstance(item, msgspec.Struct)]
        most = MAX_PROMPTS if parts else _MAX_ENTRIES
        if len(value) > most:
            raise refusal("invalid_value", f"{name} may have {most} entries", name)
        for part in parts:
            _check_entries(part)


def _pack(ids: list[Any]) -> bytes:
    try:
        return pack_ids(ids)
    except OverflowError:  # stays outside of every vocabulary
        return pack_ids([min(max(token, -1), _LARGEST_ID) for token in ids])
