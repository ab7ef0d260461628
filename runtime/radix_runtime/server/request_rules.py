"""What a request may be, as far as that is known without an engine: in an API process, and in the
process that decodes large bodies for it."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import refusal
from ..messages import Generate, pack_ids
from ..sampling_params import Ids, Limits
from .protocol import Sampling
from .submission import new_id

IDS_ONLY = "this server takes token ids only (--skip-tokenizer-init): /generate with input_ids"


class RequestRules(msgspec.Struct):
    """The limits of a request, and what it has where its body says nothing: `defaults` are sampling
    parameters, `timeout` its seconds. `has_tokenizer`: whether texts are taken. `api`: the number
    of the API process that sends it."""

    limits: Limits
    defaults: dict[str, Any] = {}
    timeout: float | None = None
    has_tokenizer: bool = True
    api: int = 0


def new_request(
    rules: RequestRules,
    body: Sampling,
    ids: Ids,
    *,
    param: str,
    names: Mapping[str, str],
) -> Generate:
    """A request that fits, with a new id and a deadline. `param` is what the route calls the
    prompt; `names` translates fields of SamplingParams to what it calls them. Raises
    RequestError."""
    sampling = body.sampling()
    if isinstance(body.stop, str):
        sampling.stop = [body.stop]
    left_out = body.max_new_tokens is None
    if left_out:
        sampling.max_new_tokens = body.default_length
    sampling = rules.limits.admit(ids, sampling, param, names, left_out)
    if sampling.stop and not rules.has_tokenizer:
        field = names.get("stop", "stop")
        raise refusal("no_tokenizer", f"{field}: {IDS_ONLY}", field)
    return Generate(
        rid=new_id(""),
        input_ids=pack_ids(ids),
        sampling=sampling,
        deadline=time.monotonic() + rules.timeout if rules.timeout else None,
        constraint=body.constraint(),
        api=rules.api,
    )
