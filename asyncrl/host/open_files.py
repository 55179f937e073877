"""The limit on open files of this process and of the processes that it starts.

A login shell usually sets a soft limit of 1,024, which one router passes with 512 requests in flight: it then loses
connections, and healthy engines seem to fail. The hard limit is what the machine really allows.
"""

from __future__ import annotations

import resource

MOST = 1 << 20
"""Raised no further: some libraries walk through every number below the soft limit."""


def raise_open_files() -> int:
    """Raises the soft limit to the hard one, at most to `MOST`; returns the soft limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return soft
