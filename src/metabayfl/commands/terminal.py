"""Reading what a person typed, and showing tables."""

import os
import sys

from rich.console import Console

from metabayfl.options import InputError

WIDTH_OF_A_FILE = 160


def console() -> Console:
    """Return a console on standard output: as wide as the terminal, or wide enough for a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)


def worker_count(text: str) -> int:
    """Read the value of --workers."""
    if text == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--workers {text!r}: a number from 1, or auto, is accepted")
    return int(text)


def seed_list(text: str) -> list[int]:
    """Read the value of --seeds: numbers and ranges."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError(f"--seeds {text!r}: whole numbers such as 0,1,2 or a range such as 0-4 are accepted")
        seeds += range(int(first), int(last if dash else first) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"--seeds {text!r}: at least one seed, and each only once")
    return seeds
