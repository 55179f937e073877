"""How many threads the computations of a job get on CPU. Pure rules.

Invariants
- What the user says in OMP_NUM_THREADS holds for trainer ranks and engines alike.
- A trainer that has the machine to itself uses all cores. One that trains while engines generate leaves each engine its
  threads: with more threads than cores, trainer and engine take turns at every parallel region and both lose.
- An engine has one thread a rank. Small models get slower with more, and two engines that share cores stand still.
- Ranks of a node share its cores evenly. Every count is at least 1.
"""

from __future__ import annotations

from asyncrl.config.layout import Threads
from asyncrl.config.machine import Machine

_ENGINE = 1


def threads_on_cpu(machine: Machine, engine_ranks: int) -> Threads:
    """The threads of each trainer rank and each engine rank.

    `engine_ranks`: tensor-parallel ranks of all engines that share the cores with the trainer.
    """
    if machine.omp_threads is not None:
        return Threads(machine.omp_threads, machine.omp_threads, machine.omp_threads)
    cores, ranks = len(machine.cpus), machine.local_world_size
    beside = max((cores - engine_ranks * _ENGINE) // ranks, 1)
    return Threads(trainer=max(cores // ranks, 1), trainer_beside_engines=beside, engine=_ENGINE)
