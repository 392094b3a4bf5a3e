"""Set up the forkserver, which imports this module as the last of its preloads.

- It ends at once when its launcher is gone: Python would first unload torch, which takes about a second.
- Its objects are frozen, so that the ranks' garbage collector does not scan them: that takes 0.2 s, and copies 100 MB into each rank.
- It ignores SIGTERM, which schedulers send to whole process groups: the launcher needs it to learn how the ranks end, which may be saving.
"""

import atexit
import gc
import os
import signal


def _end_at_once(forkserver: int) -> None:
    if os.getpid() == forkserver:  # ranks inherit this handler
        os._exit(0)


def _restore_sigterm() -> None:
    if os.getppid() == _FORKSERVER:  # in each process that the forkserver forks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_FORKSERVER = os.getpid()
atexit.register(_end_at_once, _FORKSERVER)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=_restore_sigterm)
gc.freeze()
