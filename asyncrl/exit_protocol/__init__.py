"""How the ranks of a job end: signals, deadlines, and no rank that outlives the others.

The grace is `run.stop_grace_s`, 12 s by default. To leave by force means `os._exit`, after one line on stderr that
names what the rank was waiting for. With the default grace all ranks are gone within 15 s, whatever hangs.

torchrun's agent runs each rank in its own session. It forwards its signal to all ranks, waits 30 s, and then sends
SIGKILL; a second Ctrl-C arrives as SIGTERM. When a rank dies, the agent sends SIGTERM to the others in the same way. So
each rank acts as follows:

- rank 0, at SIGINT, SIGTERM or SIGHUP: stops now. It cancels the loop's scope. Work that must be kept gets half of the
  grace; then rank 0 disposes of everything. After the grace it leaves by force.
- rank 0, at a second such signal, more than 0.5 s later: leaves by force. The host's lifeline closes, and the host
  kills all engines and routers.
- rank 0, at SIGUSR1: stops gracefully. The loop finishes its step and leaves. (A SIGUSR1 before the loop is kept.)
- rank 0, when the run is over, in success or error: leaves by force if disposal, the summary or the exit of the
  interpreter takes several graces.
- ranks >= 1, at SIGINT, SIGTERM or SIGHUP: wait, because rank 0 leads the stop. They leave by force shortly after rank
  0's grace.
- ranks >= 1, when rank 0 is gone: leave by force after 2 s, which is enough for an exit of their own.
- every rank, when the agent is gone: the kernel sends SIGKILL.

Why a thread and not the event loop: the loop may be blocked, and the main thread of ranks >= 1 waits in collectives,
where Python runs no signal handlers. `signal.set_wakeup_fd` writes from the C handler, so the thread learns of every
signal, and it alone decides. Code that holds the GIL for ever stops the thread too. Then rank 0's host, which sees the
signal as well, ends rank 0 by SIGKILL 1.5 s after its grace (`host/unanswered.py`), and the agent the other ranks.

Why a beacon: the agent sends SIGKILL only 30 s after rank 0's death. A rank in a collective with other ranks, or one
that still waits for rank 0 to appear, does not notice the death by itself. A rank on another node cannot see the
beacon; the SIGTERM of its agent starts its deadline.
"""

from asyncrl.exit_protocol.policy import StopRequest
from asyncrl.exit_protocol.ranks import RankExit, RankZeroExit, keep_graceful_stop, prepare_rank

__all__ = ["RankExit", "RankZeroExit", "StopRequest", "keep_graceful_stop", "prepare_rank"]
