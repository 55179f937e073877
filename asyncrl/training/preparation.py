"""What an algorithm needs of a batch before its step: log-probs of other weights, and its own columns.

Invariants
- Nothing here has trained anything: a batch whose preparation failed or was cancelled may be prepared again.
- A correction that was switched on stays on, also after a resume under the same setting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import anyio.to_thread
import msgspec
from torch import Tensor

from asyncrl.algorithms.algorithm import OLD_LOGPROBS, Columns, role_logprobs
from asyncrl.algorithms.chosen import ChosenAlgorithm
from asyncrl.algorithms.off_policy import AUTO_MISMATCH
from asyncrl.config import Config
from asyncrl.config.sections.algorithm import REFERENCE
from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import AlgorithmError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.training.roles import ACTOR, frozen_roles
from asyncrl.training.trainer_events import CorrectionSwitchedOn

_FILE = "correction.json"


class Preparation:
    """See the module's docstring.

    Args:
        logprobs: of the sampled tokens of a batch, under the weights of a role.
        refresh: has a role take over the weights of the actor.
    """

    def __init__(
        self,
        config: Config,
        algorithm: ChosenAlgorithm,
        events: EventLog,
        *,
        logprobs: Callable[[RolloutBatch, str], Awaitable[Tensor]],
        refresh: Callable[[str], Awaitable[object]],
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._events = events
        self._logprobs = logprobs
        self._refresh = refresh
        self.roles = frozen_roles(algorithm.needs.roles, config)
        """Models that never train."""
        self._automatic = config.algorithm.correction == "auto"
        self._corrects = False

    async def prepare(self, rollout_id: int, batch: RolloutBatch) -> tuple[RolloutBatch, Mapping[str, float]]:
        """The batch with all columns, and the figures of the algorithm. Raises AlgorithmError."""
        # As the loss computes them: text that no policy of this job sampled is judged at temperature 1.
        judged = batch if self._algorithm.needs.engine_logprobs else replace(batch, temperature=1.0)
        for role in self.roles:
            if role.name == REFERENCE and self._is_due(rollout_id):
                await self._refresh(REFERENCE)
            batch = _with_column(batch, role_logprobs(role.name), await self._logprobs(judged, role.name))
        if self._corrects:
            batch = _with_column(batch, OLD_LOGPROBS, await self._logprobs(judged, ACTOR))
        made = await self._columns(batch)
        mask = batch.loss_mask if made.keep is None else batch.loss_mask & made.keep
        return replace(batch, columns={**batch.columns, **made.tokens}, loss_mask=mask), made.metrics

    def trained(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Switches the correction on where the mismatch of the step asks for it, from the next step on."""
        mismatch = metrics.get("train/mismatch_k3", 0.0)
        if self._automatic and not self._corrects and mismatch > AUTO_MISMATCH:
            self._corrects = True
            self._events.emit(CorrectionSwitchedOn(step=rollout_id + 1, mismatch=mismatch, threshold=AUTO_MISMATCH))

    def save(self) -> dict[str, bytes]:
        """Files for a checkpoint, by name."""
        return {_FILE: msgspec.json.encode({"on": self._corrects})} if self._automatic else {}

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Goes on from what `save` gave."""
        if self._automatic and _FILE in files:
            self._corrects = msgspec.json.decode(files[_FILE], type=dict[str, bool])["on"]

    def _is_due(self, rollout_id: int) -> bool:
        """Whether the reference takes over the policy's weights before this step."""
        given = self._config.algorithm
        if rollout_id == 0:
            return given.reference is None
        return given.reference_interval is not None and rollout_id % given.reference_interval == 0

    async def _columns(self, batch: RolloutBatch) -> Columns:
        """What the algorithm computes over the whole batch; in a thread, since it may take long."""
        try:
            with waiting("the columns of the batch", "the algorithm", self._config.train.step_timeout_s):
                return await anyio.to_thread.run_sync(self._algorithm.columns, batch, abandon_on_cancel=True)
        except TimeoutError as error:
            raise AlgorithmError(f"train.algorithm: {self._config.train.algorithm}: {error}") from None


def _with_column(batch: RolloutBatch, name: str, column: Tensor) -> RolloutBatch:
    return replace(batch, columns={**batch.columns, name: column})
