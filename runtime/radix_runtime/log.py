"""Logging of every process: one format on stderr, never a prompt or a generated text."""

import logging

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(process_name)s: %(message)s"
# Libraries that log every request of theirs at level info; huggingface_hub 2 has httpx's successor.
_QUIET = (
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "urllib3",
    "filelock",
    "asyncio",
    "uvicorn.error",
)


def setup_logging(process_name: str, level: str = "info") -> None:
    """Sends the logs of this process to stderr; calling it again replaces the settings."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S", defaults={"process_name": process_name})
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # A full disk or a closed pipe must not stop serving: lines are dropped, without a traceback.
    logging.raiseExceptions = False
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
