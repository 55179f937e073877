"""The reward of the judge recipe: a model that is served beside the policy says what is right.

No reference answer is read. One question is asked for each prompt, and all samples of the group are held against it.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.data.sample import Prompt, Sample
from asyncrl.served import served_model

JUDGE = "judge"
"""Its section is [models.judge]."""


async def agrees(samples: Sequence[Sample], prompt: Prompt, max_new_tokens: int = 12) -> list[float]:
    """Returns 1 for each sample that answers as the judge does, else 0. For `reward.scope = "group"`.

    Raises ServedModelError where the judge does not answer.
    """
    said = await served_model(JUDGE).complete_async(prompt.token_ids.tolist(), max_new_tokens=max_new_tokens)
    return [float(sample.text.strip() == said.strip()) for sample in samples]
