"""`radix serve`: checks what can be checked without a model, then runs the supervisor."""

import argparse
import ipaddress
import logging
import socket
from contextlib import closing
from pathlib import Path

from ..config import ServerArgs
from ..hub import DEMO_MODEL_NAME, resolve_model_path
from ..log import setup_logging
from ..model_config import ModelConfig
from ..processes.supervisor import Supervisor
from ..server.listener import bind_port
from .flags import add_model_argument, add_server_flags, explain, server_args

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `radix serve`."""
    add_model_argument(parser)
    add_server_flags(parser)
    parser.add_argument(
        "--explain-config", action="store_true", help="print every setting and exit"
    )


def run(namespace: argparse.Namespace) -> int:
    """Serves until a signal or a death ends the server; its exit code."""
    args = server_args(namespace)
    if namespace.explain_config:
        print(explain(args))
        return 0
    setup_logging("radix", args.log_level)
    log.info("settings (* = not the default):\n%s", explain(args))
    with closing(bind_port(args.host, args.port)) as listener:
        _warn_if_open(args, listener)
        model_dir = _resolve_paths(args)
        config = ModelConfig.from_dir(model_dir, args.json_model_override_args)
        config.check_tp(args.tp_size)
        return Supervisor(args, listener).run()


def _warn_if_open(args: ServerArgs, listener: socket.socket) -> None:
    address = listener.getsockname()[0]
    has_key = args.api_key is not None or args.api_key_file is not None
    if not has_key and not ipaddress.ip_address(address).is_loopback:
        log.warning(
            "ANYBODY WHO REACHES %s:%d CAN USE THIS SERVER: set --api-key-file",
            args.host,
            args.port,
        )


def _resolve_paths(args: ServerArgs) -> Path:
    """Makes the paths of `args` local, so that no process looks at the network later, and returns
    the model's; clients keep the name that was given."""
    if args.served_model_name is None:
        args.served_model_name = args.model_path or DEMO_MODEL_NAME
    needs_weights = args.load_format != "dummy"
    model_dir = resolve_model_path(args.model_path, weights=needs_weights)
    args.model_path = str(model_dir)
    if args.tokenizer_path is not None:
        args.tokenizer_path = str(resolve_model_path(args.tokenizer_path, weights=False))
    return model_dir
