"""How the driver's interpreter is set up, so that nothing but work delays its event loop.

The event loop shares the interpreter with the trainer's thread, and with the objects of thousands of requests.

- *Garbage collection.* A collection visits the objects that were made since the last one, and sometimes all objects.
  With 4,096 requests in flight these are 100,000 to 1,000,000 objects, and the loop stands still for 0.1 to 0.5 s. It
  finds next to nothing, since the objects of a sample are freed without it. So collections wait until many objects were
  made and not freed. While engines are paused for new weights, a tenth as many are enough.
- *The interpreter's lock.* The loop gives it up at each write to a file. A thread that computes gives it back after the
  switch interval. The usual interval is 5 ms, which is long beside one turn of the loop.
"""

from __future__ import annotations

import gc
import sys

_SWITCH_INTERVAL_S = 0.0005
_MOST_UNSEEN = 200_000
"""Number of objects made since the last collection and not freed, at which the next one starts; about 50 MB."""
_WORTH_A_PAUSE = _MOST_UNSEEN // 10


def settle() -> None:
    """Ends start-up: no collection visits its objects any more (some 700,000 of torch and other libraries)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MOST_UNSEEN, *gc.get_threshold()[1:])
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def tidy() -> None:
    """Collects garbage where that is worth it; call it while engines generate nothing. No effect before `settle`.

    To ask how many objects are frozen would walk through all of them, for 50 ms of the pause.
    """
    if gc.get_threshold()[0] == _MOST_UNSEEN and gc.get_count()[0] > _WORTH_A_PAUSE:
        gc.collect()
