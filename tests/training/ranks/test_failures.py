from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from asyncrl.errors import AlgorithmError, TrainerError
from asyncrl.training.ranks.failures import tried

pytestmark = pytest.mark.anyio

ENDS_THE_JOB = AlgorithmError("train.algorithm: mine:Mine failed in loss: RuntimeError: oops")


@pytest.mark.parametrize(
    ("error", "told"), [(ENDS_THE_JOB, False), (TrainerError("the group is gone"), True), (TimeoutError(), True)]
)
async def test_the_failure_that_ends_a_job_is_not_told_again_by_what_it_keeps_from_ending(
    error: Exception, told: bool
) -> None:
    async def close() -> None:
        raise error

    with capture_logs() as logs:
        await tried("closing the weight transport", close, 5.0, ENDS_THE_JOB)
    assert len(logs) == told
