"""Ctrl-C that does not get lost: Python drops what a finaliser raises, and an import may make another error of it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CtrlC:
    """Remembers that Ctrl-C was pressed, besides raising KeyboardInterrupt."""

    def __init__(self) -> None:
        self.pressed = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember it from here on; where somebody else handles or ignores the signal, that stays so."""
        self.pressed = False
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def heed(self) -> None:
        """Raise again what got lost."""
        if self.pressed:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        raise KeyboardInterrupt


ctrl_c = CtrlC()
"""Of this process: a signal has no other address."""
