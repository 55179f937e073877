"""Worlds of real trainer ranks for tests: rank 0 runs a scenario over a TrainGroup, the others serve it.

Ranks are forked from a server process that has imported torch and opened no thread, so a world of two costs a tenth of
a second, and it does not matter what the test process has done before. Scenarios and faults are sent to them by value.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import anyio
import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import VersionSpan
from asyncrl.observability.events import EventLog
from asyncrl.observability.logging import logging_to
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.shard import Shard, Snapshot
from asyncrl.training.learner.backend import BackendFactory
from asyncrl.training.learner.packing import MicroBatch
from asyncrl.training.learner.step_loss import StepLoss
from asyncrl.training.learner.tally import Tally
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.ranks.rank import serve_rank
from asyncrl.training.roles import ACTOR, Role
from asyncrl.training.train_group import Publishing, TrainGroup
from asyncrl.weights.buckets import TensorSpec
from tests.training.forked_ranks import fork_server, meeting_port

Fault = Callable[[], None]
Faults = Mapping[tuple[int, str], Fault]
"""(rank, method) → what that rank does in the middle of that method, between two collectives; another role than the
actor stands before its method (`reference.logprobs`)."""
Scenario = Callable[[TrainGroup, EventLog], Awaitable[Any]]

SPECS = (
    TensorSpec("first", "float32", (3,)),
    TensorSpec("second", "bfloat16", (2, 2)),
    TensorSpec("third", "float32", ()),
)


def raise_value_error() -> None:
    raise ValueError("boom")


def die() -> None:
    os.kill(os.getpid(), 9)


def hang() -> None:
    time.sleep(1000)


@dataclass
class ScriptedBackend:
    """Every method is a sum over the ranks, so that a rank which is missing is missed."""

    config: Config
    layout: RankLayout
    role: Role
    faults: Faults = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    on_init: Callable[[ScriptedBackend], object] = id
    vocab_size = 1000

    def _together(self, method: str, value: float = 1.0) -> float:
        self.calls.append(method)
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        named = method if self.role.name == ACTOR else f"{self.role.name}.{method}"
        fault = self.faults.get((self.layout.rank, named))
        if fault is not None:
            fault()
        dist.barrier()
        return float(total)

    def init(self) -> None:
        self.on_init(self)
        self._together("init")

    def forward_backward(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch], loss: StepLoss) -> Tally:
        token_sum = self._together("forward_backward", float(batch.tokens.sum()))
        calls = float(len(self.calls))
        threads = torch.tensor(float(torch.get_num_threads()))
        dist.all_reduce(threads)
        largest = {} if loss.current is None else {"logprob_diff": 0.0, "policy_moved": 0.0}
        mismatch = {"mismatch_k3": 0.0} if largest else {}
        counts = {f"{name}_tokens": 0.0 for name in (*largest, *mismatch)}
        sums = {"loss": 0.0, "tokens": float(batch.loss_mask.sum()), **largest, **mismatch, **counts}
        columns = {
            f"column_sum.{name}": self._together(f"column {name}", float(column.sum()))
            for name, column in sorted(batch.columns.items())
        }
        return Tally(sums, {"token_sum": token_sum, "calls": calls, "threads": float(threads), **columns, **largest})

    def grad_norm(self) -> float:
        return self._together("grad_norm")

    def step(self, lr: float, grad_norm: float) -> None:
        self._together("step")

    def growth(self) -> float:
        return 1.0

    def reset_optimizer(self) -> None:
        self._together("reset_optimizer")

    def logprobs(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self._together("logprobs")
        return batch.logprobs * 2

    def copy_weights(self, source: Any) -> None:
        self._together("copy_weights")

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        return SPECS

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for spec in SPECS:
            self._together("export_tensors")
            yield spec.name, torch.ones(spec.shape, dtype=getattr(torch, spec.dtype))

    def export_hf(self, directory: Path) -> None:
        self._together("export_hf")
        if self.layout.rank == 0:
            directory.mkdir(parents=True)

    def snapshot(self) -> Snapshot:
        facts = {"rank": self.layout.rank, "role": self.role.name}
        return Snapshot(Shard({"total": torch.tensor(self._together("snapshot"))}, facts))

    def restore(self, saved: SavedShards) -> None:
        assert all(facts == {"rank": rank, "role": self.role.name} for rank, facts in enumerate(saved.facts))
        self._together("restore", float(saved.own().tensors["total"]) if saved.same_layout else 0.0)

    def offload(self, *, keep_weights: bool) -> None:
        self._together("offload")

    def onload(self) -> None:
        self._together("onload")


def make_batch(rollout_id: int = 0) -> RolloutBatch:
    """Two samples of three and two response tokens."""
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=torch.arange(9),
        sequence_lengths=torch.tensor([5, 4]),
        sample_index=torch.tensor([0, 1]),
        sampled=torch.tensor([False, False, True, True, True, False, False, True, True]),
        logprobs=torch.linspace(-1, 0, 9),
        loss_mask=torch.tensor([False, False, True, True, False, False, False, True, True]),
        rewards=torch.tensor([0.0, 1.0]),
        group_index=torch.tensor([0, 0]),
        group_ids=("g0",),
        sample_ids=("s0", "s1"),
        truncated=torch.tensor([False, True]),
        versions=((VersionSpan("0.0", 2, 5),), (VersionSpan("0.0", 2, 3), VersionSpan("1.0", 3, 4))),
        temperature=0.7,
        columns={"advantages": torch.linspace(1, 2, 9)},
    )


@dataclass(frozen=True)
class World:
    """What became of a world."""

    value: Any
    """What the scenario returned."""
    exit_codes: tuple[int | None, ...]
    """By rank; None had to be killed."""
    seconds: float


def run_world(
    scenario: Scenario,
    *,
    world_size: int = 2,
    faults: Faults | None = None,
    config: Mapping[str, Any] | None = None,
    on_init: Callable[[ScriptedBackend], object] = id,
    make_backend: BackendFactory | None = None,
    roles: Sequence[Role] = (),
    publishing: Publishing | None = None,
    timeout_s: float = 90.0,
    linger_s: float = 20.0,
) -> World:
    """Runs `scenario` on rank 0 of a fresh world. An exception of it is raised here, as a text.

    Args:
        roles: those beside the actor.
        publishing: how the actor publishes, for scenarios that do.
        make_backend: makes another backend than the scripted one, which faults and `on_init` are for.
        linger_s: how long the other ranks may take to end after rank 0 has.
    """
    began = time.monotonic()
    server = fork_server()
    parsed = Config.model_validate(config or {})
    scripted = partial(ScriptedBackend, faults=faults or {}, on_init=on_init)
    work = cloudpickle.dumps((parsed, make_backend or scripted, roles, publishing, scenario))
    reader, writer = server.Pipe(duplex=False)
    port = meeting_port()
    processes = [
        server.Process(target=_rank_main, args=(rank, world_size, port, work, writer), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    writer.close()
    try:
        if not wait([reader], timeout_s):
            raise AssertionError(f"the scenario did not end within {timeout_s:g} s")
        try:
            ok, value = pickle.loads(reader.recv_bytes())
        except EOFError:
            ok, value = True, None  # the scenario killed rank 0
        deadline = time.monotonic() + linger_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = tuple(process.exitcode for process in processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    if not ok:
        raise AssertionError(value)
    return World(value, codes, time.monotonic() - began)


def _rank_main(rank: int, world_size: int, port: int, work: bytes, writer: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    config, make_backend, roles, publishing, scenario = cloudpickle.loads(work)
    code = 0
    if rank == 0:
        try:
            drive = partial(_drive, config, make_backend, roles, publishing, scenario)
            answer = (True, anyio.run(drive, backend_options={"use_uvloop": True}))
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            answer, code = (False, f"{type(error).__name__}: {error}"), 1
        writer.send_bytes(pickle.dumps(answer))
    else:
        writer.close()
        try:
            with logging_to(None, rank=rank):
                serve_rank(config, make_backend)
        except Exception:
            code = 1
    os._exit(code)  # a thread may be stuck in a collective, on purpose


async def _drive(
    config: Config,
    make_backend: BackendFactory,
    roles: Sequence[Role],
    publishing: Publishing | None,
    scenario: Scenario,
) -> Any:
    events = EventLog(None, attempt=3)
    async with anyio.create_task_group() as task_group:
        group = TrainGroup(
            config,
            task_group=task_group,
            roles=roles,
            make_backend=make_backend,
            publishing=publishing,
            events=events,
        )
        try:
            return await scenario(group, events)
        finally:
            await group.dispose()
