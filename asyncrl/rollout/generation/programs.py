"""Programs: what a policy is asked, request by request, to make one sample.

A program talks to engines only through its session, which records every request. It may make any number of requests and
await other things between them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asyncrl.data.sample import Prompt
from asyncrl.rollout.generation.session import Session

Program = Callable[[Session, Prompt], Awaitable[None]]


async def single_turn(session: Session, prompt: Prompt) -> None:
    """One answer to the prompt."""
    await session.generate(prompt.token_ids)
