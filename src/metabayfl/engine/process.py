"""How a process of ours is set: one thread, freed memory kept, no life after its parent."""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# glibc: malloc.h and prctl.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, PR_SET_PDEATHSIG = -1, -3, 1
KEPT_BYTES, LARGEST_HEAP_BLOCK = 256 << 20, 32 << 20


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread per process: threads that share cores are slower, and results must not depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_heap() -> None:
    """Keep freed memory in the process instead of giving it back after each step: a third of a step was page faults.

    Only glibc knows these settings; elsewhere nothing is changed. They hold for the rest of the process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends, however that ends (Linux; elsewhere the closed pipe ends it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def peak_memory_bytes() -> int:
    """Most memory that this process has had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
