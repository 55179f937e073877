"""How many threads the computations of a job get on CPU. Pure rules.

Invariants
- What the user says in OMP_NUM_THREADS holds for trainer ranks and engines alike.
- Whoever has the machine to itself uses its cores: the trainer while engines stand still, and engines while it does, at
  most `_MOST_OF_AN_ENGINE` a rank.
- An engine of a small model has one thread. Its operations are short, and threads that meet after each of them take the
  cores from its HTTP server, the router and the driver: a step of the demo waits 0.31 s in place of 0.23 s for samples.
- Where both compute at once (`train_async.py`), engines get half of the cores at most, and the trainer the others. With
  more threads than cores, both wait for each other at every parallel region, and two engines stand still.
- Ranks of a node share its cores evenly. Every count is at least 1.
"""

from __future__ import annotations

from asyncrl.config.layout import Threads
from asyncrl.config.machine import Machine

_MOST_OF_AN_ENGINE = 4


def threads_on_cpu(machine: Machine, engine_ranks: int) -> Threads:
    """The threads of each trainer rank and each engine rank.

    `engine_ranks`: tensor-parallel ranks of all engines that share the cores with the trainer.
    """
    if machine.omp_threads is not None:
        return Threads(*[machine.omp_threads] * 5)
    cores, ranks, engines = len(machine.cpus), machine.local_world_size, max(engine_ranks, 1)
    beside = _of_an_engine(cores // 2 // engines)
    return Threads(
        trainer=max(cores // ranks, 1),
        trainer_beside_engines=max((cores - engine_ranks * beside) // ranks, 1),
        engine=_of_an_engine(cores // engines),
        engine_beside_trainer=beside,
        small_engine=1,
    )


def _of_an_engine(share: int) -> int:
    return min(max(share, 1), _MOST_OF_AN_ENGINE)
