"""How the driver's interpreter is set up, so that nothing but work holds up its event loop.

The loop shares it with the trainer's thread and with all that belongs to thousands of requests in flight.

- *Collections* of cyclic garbage visit what was made since the last one, and every so often everything. With 4,096
  requests in flight that is 100,000 to 1,000,000 objects: the loop stands still for 0.1 to 0.5 s, to find next to
  nothing, since what a sample leaves behind is freed without it. So they wait until so much was made and not freed that
  it may well be garbage: while engines are paused for new weights a tenth of what it takes at other times.
- *The lock of the interpreter* is given up by each write to a file. A thread that computes gives it back after the
  switch interval, of which the usual one, 5 ms, would be most of the time in which the loop is to come round.
"""

from __future__ import annotations

import gc
import sys

_SWITCH_INTERVAL_S = 0.0005
_MOST_UNSEEN = 200_000
"""Objects made and not freed since the last collection; some 50 MB."""
_WORTH_A_PAUSE = _MOST_UNSEEN // 10


def settle() -> None:
    """Start-up is over: what it made stays, and is visited no more (some 700,000 objects of torch and its like)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MOST_UNSEEN, *gc.get_threshold()[1:])
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def tidy() -> None:
    """A moment in which the loop may be late, since engines generate nothing. Before `settle` there is no need."""
    if gc.get_freeze_count() and gc.get_count()[0] > _WORTH_A_PAUSE:
        gc.collect()
