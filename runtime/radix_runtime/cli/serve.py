"""`radix serve`: checks what can be checked without a model, then runs the supervisor."""

import argparse
import ipaddress
import logging

from ..hub import DEMO_MODEL_NAME, resolve_model_path
from ..log import setup_logging
from ..model_config import ModelConfig
from ..server.supervisor import Supervisor, bind_port
from .flags import add_model_argument, add_server_flags, explain, server_args

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_server_flags(parser)
    parser.add_argument(
        "--explain-config", action="store_true", help="print every setting and exit"
    )


def run(namespace: argparse.Namespace) -> int:
    args = server_args(namespace)
    if namespace.explain_config:
        print(explain(args))
        return 0
    setup_logging("radix", args.log_level)
    log.info("settings (* = not the default):\n%s", explain(args))
    listener = bind_port(args.host, args.port)
    try:
        is_local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        if not (is_local or args.api_key or args.api_key_file):
            log.warning(
                "ANYBODY WHO REACHES %s:%d CAN USE THIS SERVER: set --api-key-file",
                args.host,
                args.port,
            )
        # The paths are made local, so that nothing looks at the network later; clients keep the
        # name that was given.
        args.served_model_name = args.served_model_name or args.model_path or DEMO_MODEL_NAME
        args.model_path = str(
            resolve_model_path(args.model_path, weights=args.load_format != "dummy")
        )
        if args.tokenizer_path is not None:
            args.tokenizer_path = str(resolve_model_path(args.tokenizer_path, weights=False))
        ModelConfig.from_dir(args.model_path, args.json_model_override_args).check_tp(args.tp_size)
        return Supervisor(args, listener).run()
    finally:
        listener.close()
