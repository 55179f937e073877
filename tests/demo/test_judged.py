"""The judge recipe's reward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.demo.judged import agrees
from asyncrl.errors import ServedModelError
from tests.test_served import judge

pytestmark = pytest.mark.anyio


async def test_a_sample_is_right_where_it_says_what_the_judge_says() -> None:
    samples: Any = [SimpleNamespace(text=text) for text in ("bce", "ebc", " bce")]
    prompt: Any = SimpleNamespace(token_ids=np.array([5, 6], np.int32))
    async with judge(lambda path, body, number: (200, {"text": "bce"})) as asked:
        assert await agrees(samples, prompt) == [1.0, 0.0, 1.0]
    assert [body["input_ids"] for body in asked] == [[5, 6]], "one question for all samples of the prompt"
    with pytest.raises(ServedModelError, match="no model is served as 'judge'"):
        await agrees(samples, prompt)
