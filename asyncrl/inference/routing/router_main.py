"""The main module of the router's process: arguments and server of sglang-router or smg, without their launchers.

`python -m sglang_router.launch_router` imports a Python load balancer for debugging, and with it all of sglang and
torch: 9 s of CPU before the router binds its port. The Rust router itself is there in a fifth of a second.

The key for its list of workers comes from the job's file, not from the command line, which every local user can read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncrl.config.checks.router_args import MODULES
from asyncrl.inference.sglang.cpu_platform import PRIVATE
from asyncrl.run_directory.engine_key import read_key


def parse(package: str, argv: Sequence[str]) -> Any:
    """The command line as the router's own launcher reads it: an instance of its `RouterArgs`."""
    router_args = import_module(f"{MODULES[package]}.router_args").RouterArgs
    parser = argparse.ArgumentParser(prog=package, allow_abbrev=False)
    router_args.add_cli_args(parser)
    return router_args.from_cli_args(parser.parse_args(argv))


def main() -> None:
    """Runs the router that the command line asks for (`sglang-router --port ...`), until a signal ends it."""
    package, *argv = sys.argv[1:]
    args = parse(package, argv)
    if key := read_key(Path(os.environ[PRIVATE])) if PRIVATE in os.environ else None:
        args.control_plane_api_keys = [("job", "job", key, "admin")]  # id, name, key, role
    print(f"{package} on http://{args.host}:{args.port}, policy {args.policy}", flush=True)
    print(f"metrics on http://{args.prometheus_host}:{args.prometheus_port}/metrics", flush=True)
    import_module(f"{MODULES[package]}.router").Router.from_args(args).start()


if __name__ == "__main__":
    main()
