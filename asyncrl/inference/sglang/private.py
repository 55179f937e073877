"""What SGLang does not do by itself to keep an engine to its user; runs in each process of an engine.

- torch's rendezvous store listens on every interface, whatever address it is given. Here it gets a socket that listens
  on the address alone.
- SGLang logs its arguments, the key among them. Here no record of a log holds it.
"""

from __future__ import annotations

import logging
import socket
from importlib import import_module
from pathlib import Path
from typing import Any

_HIDDEN = "***"
_done = False


def keep_private(config: str) -> None:
    """Binds stores to their address and hides the key in the file `config` from logs. Idempotent."""
    global _done
    if _done:
        return
    _done = True
    _bind_stores()
    # `run_directory.engine_key` would read it too, and import what no engine needs.
    if key := Path(config).read_text().partition(":")[2].strip():
        _hide(key)


def _bind_stores() -> None:
    rendezvous: Any = import_module("torch.distributed.rendezvous")  # its package has a function of that name
    original = rendezvous.TCPStore

    def store(host_name: str, port: int, *arguments: Any, is_master: bool = False, **options: Any) -> Any:
        if is_master:
            listener = socket.create_server((host_name, port))
            options |= {"master_listen_fd": listener.detach()}
        return original(host_name, port, *arguments, is_master=is_master, **options)

    rendezvous.TCPStore = store


def _hide(key: str) -> None:
    make = logging.getLogRecordFactory()

    def make_without_key(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make(*arguments, **options)
        try:
            text = record.getMessage()
        except Exception:  # a record that cannot be formatted is reported by its handler
            return record
        if key in text:
            record.msg, record.args = text.replace(key, _HIDDEN), None
        return record

    logging.setLogRecordFactory(make_without_key)
