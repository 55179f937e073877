"""Keeps samples as text: some of each training batch, and those of evaluations.

Invariants
- A file that cannot be written costs samples, never the run: it is told once, and the next batch is tried again.
- A line tells all that is known of one sample; nobody needs the data or the tokenizer to read it.
- Together, samples.jsonl and samples.1.jsonl take at most `2 * max_megabytes` and one batch more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog
from numpy.typing import NDArray

from asyncrl.config.sections.shown import SamplesConfig
from asyncrl.data.sample import Prompt, Sample, SampleGroup
from asyncrl.errors import RunDirectoryError
from asyncrl.observability.line_file import LineFile, encode_line

SAMPLES_FILE = "samples.jsonl"
OLDER_SAMPLES_FILE = "samples.1.jsonl"
Kind = Literal["train", "eval"]

_MEGABYTE = 1_000_000
_log = structlog.get_logger(__name__)


class SampleLog:
    """Appends to samples.jsonl; safe from any thread. It writes files, so call it in a thread of its own."""

    _lock = threading.Lock()
    """Of all logs of the process: the executors of a job write into one file."""

    def __init__(
        self, run_dir: Path, config: SamplesConfig, attempt: int, decode: Callable[[NDArray[np.int32]], str]
    ) -> None:
        """`decode` makes text of token ids; only samples of several turns need it."""
        self._path = run_dir / SAMPLES_FILE
        self._older = run_dir / OLDER_SAMPLES_FILE
        self._config = config
        self._attempt = attempt
        self._decode = decode
        self._told = False

    def keep_step(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Keeps `per_step` samples of the batch of step number `step` (from 1)."""
        self._keep("train", step, spread(groups, self._config.per_step))

    def keep_evaluation(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Keeps `per_evaluation` samples of the evaluation after `step` trained steps."""
        self._keep("eval", step, spread(groups, self._config.per_evaluation))

    def records(self, groups: Sequence[SampleGroup]) -> list[dict[str, Any]]:
        """What is known of every sample of `groups`, as plain JSON types."""
        return [self._record(group.prompt, sample) for group in groups for sample in group.samples]

    def _keep(self, kind: Kind, step: int, chosen: Sequence[tuple[Prompt, Sample]]) -> None:
        if not chosen:
            return
        head = {"kind": kind, "step": step, "attempt": self._attempt, "time": time.time()}
        lines = b"".join(encode_line(head | self._record(prompt, sample)) for prompt, sample in chosen)
        with self._lock:
            try:
                self._rotate()
                file = LineFile(self._path)
            except (OSError, RunDirectoryError) as error:
                self._tell(step, error)
                return
            try:
                if not file.append(lines):
                    self._tell(step, file.last_error)
            finally:
                file.close()

    def _rotate(self) -> None:
        if self._path.exists() and self._path.stat().st_size >= self._config.max_megabytes * _MEGABYTE:
            self._path.replace(self._older)

    def _tell(self, step: int, error: Exception | None) -> None:
        if not self._told:
            self._told = True
            _log.warning(f"samples are not kept: {self._path} cannot be written", step=step, error=str(error))

    def _record(self, prompt: Prompt, sample: Sample) -> dict[str, Any]:
        record: dict[str, Any] = {
            "sample_id": sample.sample_id,
            "group_id": sample.group_id,
            "prompt_id": prompt.prompt_id,
            "prompt": prompt.text,
            "response": sample.text,
            "answer": prompt.answer,
            "reward": sample.reward,
            "finish_reason": sample.finish_reason,
            "tokens": len(sample.output_ids),
            "versions": list(dict.fromkeys(span.version for span in sample.versions)),
            "failure": sample.failure,
        }
        if sample.reward_parts:
            record["reward_parts"] = sample.reward_parts
        if len(sample.turns) > 1:
            record["turns"] = [
                {"read": self._decode(turn.context_ids), "sampled": self._decode(turn.output_ids)}
                for turn in sample.turns
            ]
        return record


def spread(groups: Sequence[SampleGroup], count: int | None) -> list[tuple[Prompt, Sample]]:
    """`count` samples of `groups` with their prompts, evenly spread over all of them; None: all.

    Where some sample failed, one that did is among them.
    """
    every = [(group.prompt, sample) for group in groups for sample in group.samples]
    if count is None or count >= len(every):
        return every
    chosen = [every[i * len(every) // count] for i in range(count)]
    if chosen and not any(sample.failure for _, sample in chosen):
        chosen[-1] = next((pair for pair in every if pair[1].failure), chosen[-1])
    return chosen
