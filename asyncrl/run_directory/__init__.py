"""The directory that holds everything a run leaves behind: config, metrics, events, logs, export, summary.

Invariants
- One process at a time uses a directory. The lock is the kernel's, so it ends with its process, however that ends.
- A job takes a directory only if it is new, empty, or holds a run of ours (`.asyncrl-run.json`) that left nothing but
  logs or that the user agreed to overwrite or resume. Nothing else is ever erased or written into.
- A run that is to be overwritten is erased once the new one has trained a step, and back in its place where that ends
  earlier.
- A gang that torchrun restarted goes on in the directory of its first attempt, whatever `run.if_exists` says.
- The saved configuration carries no secrets.
"""

from asyncrl.run_directory.directory import Gang, RunDirectory
from asyncrl.run_directory.running import control_socket, holder, running_beside, running_job

__all__ = ["Gang", "RunDirectory", "control_socket", "holder", "running_beside", "running_job"]
