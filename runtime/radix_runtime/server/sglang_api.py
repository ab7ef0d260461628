"""POST /generate and /abort_request, as SGLang has them."""

import time
from collections.abc import Iterator
from typing import Any

from ..errors import RequestError, refusal
from ..messages import Generate, TextDelta, unpack_ids
from ..text.sglang_output import sglang_output
from .answer import Answer
from .body_decoder import is_one_prompt
from .http_call import HttpCall
from .json_pieces import GrowingRows, Rows
from .prompt_requests import generate_requests, spread
from .protocol import AbortBody, GenerateBody, require_one_of
from .submission import Batch, new_id
from .turns import in_turns


async def generate(call: HttpCall, body: GenerateBody) -> None:
    """Continues each prompt. Raises RequestError."""
    manager = call.manager
    param = require_one_of(body, "text", "input_ids")
    all_ids = await manager.text.encode(getattr(body, param), param)
    requests: list[Generate] = []
    await in_turns(map(requests.append, generate_requests(manager.rules, body, all_ids, param)))
    await GenerateAnswer(call, body, requests=requests).send()


async def abort_request(call: HttpCall, body: AbortBody) -> None:
    """Aborts a request or all of them; always 200, however often it is asked. Raises
    RequestError."""
    if body.abort_all:
        if not call.caller.is_admin:
            raise RequestError(
                status=403, code="admin_key_required", message="abort_all needs the admin key"
            )
        count = await call.manager.names.abort_all()
    elif body.rid:
        count = await call.manager.names.abort(body.rid, call.caller)
    else:
        raise refusal("missing_field", "rid is required", "rid")
    await call.answer({"aborting": count})


class GenerateAnswer(Answer):
    """An object a choice; a single prompt with one choice is not put into a list. A stream repeats
    all output so far unless the client asked for pieces."""

    def __init__(self, call: HttpCall, body: GenerateBody, requests: list[Generate]) -> None:
        name = body.rid if isinstance(body.rid, str) else new_id("")
        super().__init__(call, body, requests=requests, name=name)
        if isinstance(body.rid, list):  # a name for each request
            names = spread(body.rid, len(requests), "rid")
            self.labels = dict(zip(self.labels, names, strict=True))
        self._pieces = bool(body.incremental_streaming_output)
        self._so_far: dict[int, dict[str, Any]] = {}
        self._rows: dict[tuple[int, str], GrowingRows] = {}
        self._listed = _is_batch(body) or len(self.request_of) > 1
        self._tokenizer = call.manager.tokenizer if body.return_text_in_logprobs else None

    def whole(self, deltas: list[TextDelta]) -> Any:
        """One object, or a list of them."""
        results = [self._result(i, delta) for i, delta in enumerate(deltas)]
        return results if self._listed else results[0]

    def events(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """An object for each choice that has grown."""
        for choice, delta in batch.items():
            result = self._result(choice, delta)
            if not self._pieces:
                result = self._appended(choice, result)
            yield {"index": choice, **result} if self._listed else result

    def deliver(self, index: int, delta: TextDelta) -> bool:
        """See Answer. Not what repeats all output so far, which may be long."""
        return self._pieces and super().deliver(index, delta)

    def _result(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        request = self.request_of[choice]
        seconds = time.perf_counter() - self.call.started
        delta.prompt_logprobs = self.submission.prompt_logprobs.pop(choice, None)
        ids = unpack_ids(delta.ids).tolist()
        result = sglang_output(request, delta, ids, seconds, self._tokenizer, rows=Rows)
        result["meta_info"]["id"] = self.labels[request.rid]
        if self.call.warnings:
            result["warnings"] = self.call.warnings
        return result

    def _appended(self, choice: int, new: dict[str, Any]) -> dict[str, Any]:
        """What has come of a choice, with `new`. Entries of logprobs are encoded when they come,
        not in every event that repeats them."""
        old = self._so_far.get(choice)
        meta = new["meta_info"]
        for name, value in meta.items():
            if isinstance(value, Rows):
                rows = self._rows.setdefault((choice, name), GrowingRows())
                rows.extend(value.entries)
                meta[name] = rows
        if old is not None:
            new["text"] = old["text"] + new["text"]
            new["output_ids"] = old["output_ids"] + new["output_ids"]
        self._so_far[choice] = new
        return new


def _is_batch(body: GenerateBody) -> bool:
    """Whether the client gave a list of prompts, be it of one."""
    if body.input_ids is not None:
        return not is_one_prompt(body.input_ids)
    return isinstance(body.text, list)
