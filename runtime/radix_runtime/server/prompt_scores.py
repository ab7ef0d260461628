"""`prompt_logprobs` of OpenAI's routes, as vLLM has them."""

from typing import Any

from ..messages import Generate, Logprobs
from ..text.choices import Scored, num_scored, scored
from ..text.tokenizer import Tokenizer
from .json_pieces import Rows


def want_prompt_scores(request: Generate, wanted: int | None, echoed: int | None = None) -> None:
    """Asks for the scores of the whole prompt, with so many of the likeliest tokens beside each of
    its own: for `prompt_logprobs`, where `wanted`, and for an echo, where `echoed`."""
    if wanted is not None or echoed is not None:
        request.logprob_start = 0
    if wanted is not None:
        request.prompt_logprobs = max(wanted, echoed or 0)


def prompt_scores(logprobs: Logprobs | None, top: int, tokenizer: Tokenizer) -> Rows:
    """An entry for each token of the prompt, null for the first, which follows nothing: the token
    and the `top` likeliest in its place, by their ids."""
    entries = (_entry(entry, top, tokenizer) for entry in scored(logprobs))
    return Rows(entries, num_scored(logprobs))


def _entry(entry: Scored, top: int, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The token of the prompt comes first, whatever its rank."""
    if entry.logprob is None:
        return None
    found = {entry.token: (entry.logprob, entry.rank)}
    for rank, (token, logprob) in enumerate(entry.top[:top], 1):
        found.setdefault(token, (logprob, rank))
    return {
        str(token): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": tokenizer.id_to_text(token),
        }
        for token, (logprob, rank) in found.items()
    }
