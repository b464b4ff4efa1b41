"""Ctrl-C before there is a server that could stop.

Python drops an exception that is raised where nobody can catch it, as in a destructor, and imports run many
of those. So what was asked is noted too, and looked at once they are done.
"""

from __future__ import annotations

import signal
import threading


class Interrupt:
    seen = False

    def listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._note)

    def raise_dropped(self) -> None:
        """Errors: KeyboardInterrupt, where one came since `listen`."""
        if self.seen:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: object) -> None:
        self.seen = True
        raise KeyboardInterrupt


EARLY = Interrupt()
