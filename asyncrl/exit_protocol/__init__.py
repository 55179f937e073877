"""How the ranks of a job end: signals, watchdogs, and nobody outliving anybody.

torchrun's agent runs each rank in a session of its own and forwards its signal to all of them, waits 30 s, then
SIGKILLs; a second Ctrl-C arrives as SIGTERM. When a rank dies, it SIGTERMs the others in the same way. So:

- rank 0, at SIGINT, SIGTERM or SIGHUP: stop now. The loop's scope is cancelled, what it wants kept gets half of the
  grace, then all is disposed of; past the grace, leave by force.
- rank 0, at a second one more than 0.5 s later: leave by force. The lifeline closes, and the host kills the rest.
- rank 0, at SIGUSR1: graceful stop. The loop finishes its step and leaves. (One that comes before the loop is kept.)
- rank 0, when the run is over, well or not: leave by force where disposal, summary or the interpreter's own end take
  several graces each.
- ranks >= 1, at SIGINT, SIGTERM or SIGHUP: nothing, rank 0 leads the stop; leave by force shortly after its grace.
- ranks >= 1, when rank 0 is gone: leave by force after 2 s, the time for an end of their own.
- every rank, when the agent is gone: SIGKILL by the kernel.

By force means `os._exit` after one line on stderr that names what was waited for. With the default grace of 12 s
everybody is gone within 15 s, whatever is stuck.

Why a thread and not the event loop: the loop may be blocked, and the main thread of ranks >= 1 sits in collectives,
where Python's signal handlers do not run. `signal.set_wakeup_fd` writes from the C handler, so the thread learns of
every signal; it alone decides. (What holds the GIL for ever stops it too; then the agent's SIGKILL ends the rank.)

Why a beacon: the agent SIGKILLs 30 s after rank 0's death, and a rank inside a collective with other ranks, or one
that still waits for rank 0 to appear, does not notice by itself. Ranks of other nodes have their agent's SIGTERM and
the deadline that it starts.
"""

from asyncrl.exit_protocol.policy import StopRequest
from asyncrl.exit_protocol.ranks import RankExit, RankZeroExit, keep_graceful_stop, prepare_rank

__all__ = ["RankExit", "RankZeroExit", "StopRequest", "keep_graceful_stop", "prepare_rank"]
