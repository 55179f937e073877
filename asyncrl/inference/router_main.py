"""The router's process: sglang-router's own arguments and server, without its Python load balancer.

`python -m sglang_router.launch_router` imports that debugging aid, and with it all of sglang and torch: 9 s of CPU
before the router binds its port. The Rust router itself is there in a tenth of a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs


def parse(argv: Sequence[str]) -> RouterArgs:
    """The router's command line, as its own launcher reads it."""
    parser = argparse.ArgumentParser(prog="router")
    RouterArgs.add_cli_args(parser)
    return RouterArgs.from_cli_args(parser.parse_args(argv))


def main() -> None:
    Router.from_args(parse(sys.argv[1:])).start()


if __name__ == "__main__":
    main()
