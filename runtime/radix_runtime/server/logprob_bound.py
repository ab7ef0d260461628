"""How many log-probabilities the answer of one call may have."""

from collections.abc import Iterable

from ..errors import refusal
from ..messages import Generate, num_ids

MAX_LOGPROBS = 4 << 20  # 32 MiB where each is packed with its id


def logprob_values(request: Generate, tokens: int) -> int:
    """The log-probabilities that a request's answer has at most, if each of its choices has so many
    tokens. Each choice repeats those of the prompt."""
    values = tokens * (1 + request.top_logprobs) if request.return_logprob else 0
    if request.logprob_start >= 0:
        scored = num_ids(request.input_ids) - request.logprob_start
        values += scored * (1 + request.prompt_top)
    return request.sampling.n * values


def clip_logprobs(request: Generate) -> None:
    """Lowers a number of new tokens that nobody asked for to what one answer may have
    log-probabilities of."""
    tokens = request.sampling.max_new_tokens
    assert tokens is not None
    of_token = logprob_values(request, 1) - logprob_values(request, 0)
    if of_token:
        fits = (MAX_LOGPROBS - logprob_values(request, 0)) // of_token
        request.sampling.max_new_tokens = max(1, min(tokens, fits))


def check_logprobs(requests: Iterable[Generate], most: int) -> None:
    """Raises RequestError if the answer of a call could have more than `most` log-probabilities."""
    values = 0
    param = "prompt_logprobs"
    for request in requests:
        if request.return_logprob:
            param = "logprobs"
        values += logprob_values(request, request.sampling.max_new_tokens or 0)
    if values > most:
        raise refusal(
            "invalid_value",
            f"the answer could have {values} log-probabilities, at most {most} fit: "
            f"ask for {values / most:.3g} times fewer tokens, alternatives, choices or "
            "prompts",
            param,
        )
