"""Checkpoints of a run: the trainer and its executors are saved together, and go on together.

The files of an executor with a name begin with the name and a dot.

Invariants
- An executor is saved between a commit and the next batch, and the trainer before a publication takes it off its GPUs.
- The last trained step is saved exactly once, whatever ended the loop: its planned end, a graceful stop that came after
  the step had its turn to be saved, or a signal.
- At a signal the step in progress is saved too. What cannot be saved, or is not kept, is said, with the reason.
- An attempt that begins anew says so, and overwrites no export or summary of the attempt before.
- Groups that ended after the checkpoint from which a job goes on are marked as rolled back in the event log.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread

from asyncrl.errors import AsyncRLError, ConfigError, counted
from asyncrl.observability.events import FaultSeen, read_events
from asyncrl.rollout.group_events import GroupsRolledBack
from asyncrl.rollout.scheduling.ledger import rolled_back
from asyncrl.run.job import Job

if TYPE_CHECKING:
    from asyncrl.rollout.scheduling.ledger import Reached
    from asyncrl.run.parts import RolloutPart
    from asyncrl.run.turns import Halves


class Checkpoints:
    """The checkpoints of one trainer and its executors."""

    def __init__(self, job: Job, halves: Halves, executor: RolloutPart, trainer_name: str) -> None:
        """`trainer_name` is the name by which the executors know the trainer."""
        self._job = job
        self._settings = job.config.checkpoint
        self._halves = halves
        self._executors = [executor]
        self._first = 0
        self._trainer = halves.trainer
        self._trainer_name = trainer_name

    async def resume(self, first: int) -> None:
        """Has the executor go on where the trainer does, after `first` steps; the trainer has begun.

        Raises CheckpointError for a checkpoint without the executor's part, DataError for other data than it was
        written with.
        """
        self._first = first
        await self._go_on(self._executors[0])
        resumed = self._trainer.resumed
        if resumed is not None:
            layouts = f", in another layout: {resumed.other_layout}" if resumed.other_layout else ""
            self._job.record.note(f"resumed from {resumed.path}{layouts}")
        elif self._job.directory.attempt > 0:
            kept = await anyio.to_thread.run_sync(self._job.directory.set_results_aside)
            aside = f"; what the attempt before left is kept in {', '.join(path.name for path in kept)}" if kept else ""
            self._job.record.note(f"no checkpoint to go on from: training begins at the model, with step 1{aside}")

    async def add(self, executor: RolloutPart) -> None:
        """From now on `executor` is saved too. Where the trainer goes on from a checkpoint, it does so as well.

        Idempotent. Raises ConfigError where another one has its name, and as `resume` does.
        """
        if any(known is executor for known in self._executors):
            return
        if any(known.name == executor.name for known in self._executors):
            raise ConfigError(
                f"two rollout executors are named {executor.name!r}, and their groups could not be told apart; give "
                "each its own name in create_rollout_executor"
            )
        await self._go_on(executor)
        self._executors.append(executor)

    async def _go_on(self, executor: RolloutPart) -> None:
        job, resumed, name = self._job, self._trainer.resumed, executor.name

        async def roll_back(reached: Reached | None) -> None:
            """Before restored groups are told, those that ended since are told as rolled back."""
            if job.directory.attempt > 0:
                read = partial(read_events, job.directory.events)
                group_ids = await anyio.to_thread.run_sync(lambda: rolled_back(read(), reached, name))
                if group_ids:
                    job.events.emit(GroupsRolledBack(step=self._first, group_ids=group_ids))

        if resumed is None:
            await roll_back(None)
        else:
            files = _part_of(resumed.extra, name)
            if name and not files:
                job.record.note(f"{resumed.path} knows no rollout executor {name!r}: it begins with its first prompt")
                await roll_back(None)
            else:
                await executor.restore(files, self._first, roll_back)

    async def save_if_due(self, rollout_id: int, *, last: bool) -> None:
        """Saves after rollout `rollout_id` where `checkpoint.every` says so, and the `last` one.

        A checkpoint is written beside the training. Only the last one is waited for.
        """
        if self._settings.every and (last or self._settings.due(rollout_id + 1)):
            with self._job.record.phase("checkpoint"):
                await self._save(rollout_id, wait=last)

    async def save_last(self) -> None:
        """After the loop: saves its last step where that was not done.

        On shared GPUs this takes the trainer's turn; a publication is to follow.
        """
        if not self._settings.every:
            return
        with self._job.record.phase("checkpoint"):
            if await self._is_saved() or self._trainer.statistics().saving is not None:  # the latter where a disk hangs
                return
            await self._job.turns.trainers_turn(self._halves)
            await self._save(self._trainer.statistics().step - 1, wait=True)

    async def save_now(self) -> None:
        """A signal has ended the loop: saves all steps since the last checkpoint, the step in progress included.

        A checkpoint is not begun where the last one took longer than there is time for. On shared GPUs the trainer gets
        its turn first, wherever the loop was. Says what was saved, or was not. An AsyncRLError is said, and not
        raised.
        """
        now, patience_s = self._trainer.statistics(), self._job.config.run.checkpoint_grace_s
        if now.failure is not None:
            return
        if not self._settings.every:
            self._tell_loss(now.step)
            return
        step = now.step + 1  # where a step is in progress
        problem = f"{now.thread.running or 'the step in progress'} did not end within {patience_s:g} s"
        try:
            trained = await self._trainer.settle()
            for executor in self._executors:
                executor.settle(trained, self._trainer_name)
            now = self._trainer.statistics()
            step, problem = now.step, f"none was written within {patience_s:g} s"
            if await self._is_saved():
                problem = ""
            elif now.checkpoint is not None and now.checkpoint.seconds > patience_s:
                problem = f"the last one took {now.checkpoint.seconds:.1f} s, and there are {patience_s:g} s for it"
            else:
                await self._job.turns.trainers_turn(self._halves)
                if await self._save(now.step - 1, wait=True):
                    problem = ""
        except AsyncRLError as error:  # of the step in progress, of generation, of another trainer's batch, ...
            problem = str(error)
        finally:
            if problem:
                told = f"stopped without a checkpoint of step {step}: {problem}"
                if self._trainer.statistics().saving == step:  # the end of the trainer still leaves it a few seconds
                    told = f"stopped while the checkpoint of step {step} was still being written after {patience_s:g} s"
                self._job.record.note(told)
                self._job.events.emit(FaultSeen(component="checkpoint", what=told))
            elif step > self._begun():
                self._job.record.note(
                    f"step {step} is saved: the same command with --run.if-exists resume goes on after it"
                )

    def _tell_loss(self, step: int) -> None:
        """The job ends after `step` steps, and no checkpoint is kept."""
        lost = step - self._begun()
        if lost > 0 and not self._job.config.debug.rollout_only:
            steps = counted(lost, "step") if lost > 1 else "step"
            self._job.record.note(
                f"no checkpoint was written, as checkpoint.every is 0: no job can go on after the {steps} of this "
                f"attempt; set it, or end a job with asyncrl stop {self._job.directory.path}, which exports the policy"
            )

    def _begun(self) -> int:
        """The step after which this attempt began."""
        return 0 if self._trainer.resumed is None else self._trainer.resumed.step

    async def _save(self, rollout_id: int, *, wait: bool) -> bool:
        """Whether a checkpoint of rollout `rollout_id` was begun, or with `wait` was written."""
        extra: dict[str, bytes] = {}
        for executor in self._executors:
            extra |= {_file_of(executor.name, file): data for file, data in (await executor.save()).items()}
        return await self._trainer.save_checkpoint(rollout_id, extra, wait=wait) is not None

    async def _is_saved(self) -> bool:
        """Whether all trained steps are in a checkpoint; waits for one of the last step that is being written."""
        if self._trainer.statistics().saving == self._trainer.statistics().step:
            await self._trainer.finish_checkpoint()
        now = self._trainer.statistics()
        return now.step in (self._begun(), now.checkpoint and now.checkpoint.step)


def _file_of(executor: str, file: str) -> str:
    return f"{executor}.{file}" if executor else file


def _part_of(extra: Mapping[str, bytes], executor: str) -> Mapping[str, bytes]:
    """The files of one executor, by its own names for them."""
    if not executor:
        return extra
    prefix = _file_of(executor, "")
    return {file.removeprefix(prefix): data for file, data in extra.items() if file.startswith(prefix)}
