"""Which shapes steps are padded to, and captured in."""

from ..config import ServerArgs
from ..errors import ConfigError
from ..step_shape import StepShapes, default_decode_sizes, default_token_sizes

# Steps with chunks are captured up to so many operations, a few milliseconds of a GPU: beyond, the
# device takes longer than the host to queue the kernels, and padding would only add to it.
_CHUNK_OPERATIONS = 5e12
_LEAST_MAX_TOKENS = 512
_MOST_MAX_TOKENS = 2048


def choose_shapes(
    args: ServerArgs, num_parameters: int, *, most_tokens: int, with_chunks: bool
) -> StepShapes:
    """The shapes of a rank with so many parameters, whose steps have at most `most_tokens` tokens.
    `with_chunks`: the work of a step with chunks follows from its shape, so that a graph can hold
    it. Raises ConfigError."""
    check_graph_flags(args, with_chunks=with_chunks)
    max_batch = args.running_limit
    max_tokens = 0
    if with_chunks:
        max_tokens = min(_max_tokens(args, num_parameters), most_tokens)
    return StepShapes(
        decode_sizes=_decode_sizes(args, max_batch),
        token_sizes=default_token_sizes(max_tokens),
        max_batch=max_batch,
    )


def check_graph_flags(args: ServerArgs, *, with_chunks: bool) -> None:
    """Raises ConfigError for shapes that cannot be captured. `with_chunks`: as `choose_shapes`."""
    if args.cuda_graph_max_tokens and not with_chunks:
        raise ConfigError(
            "--cuda-graph-max-tokens: steps with chunks of a model with latent attention are not "
            "captured"
        )
    largest = max(args.cuda_graph_bs or [0])
    if largest > args.running_limit:
        limit = f"--max-running-requests {args.running_limit}"
        raise ConfigError(f"--cuda-graph-bs {largest} exceeds {limit}")


def _decode_sizes(args: ServerArgs, max_batch: int) -> list[int]:
    if args.cuda_graph_bs is not None:
        return list(args.cuda_graph_bs)
    return default_decode_sizes(min(args.cuda_graph_max_bs or max_batch, max_batch))


def _max_tokens(args: ServerArgs, num_parameters: int) -> int:
    if args.cuda_graph_max_tokens is not None:
        return args.cuda_graph_max_tokens
    affordable = int(_CHUNK_OPERATIONS / (2 * max(num_parameters, 1)))
    return min(max(affordable, _LEAST_MAX_TOKENS), _MOST_MAX_TOKENS)
