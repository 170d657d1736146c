"""Why a rank should leave: SIGTERM, or the death of the process that started it."""

import os
import signal
import threading
import time
from types import FrameType

# After a request to leave, a rank that cannot reach the coordinator or its peers gives up within this time.
STOP_GRACE_S = 45.0
_PARENT_POLL_S = 1.0
_REQUEST_POLL_S = 0.2


class Stop:
    """A flag that a signal handler may set at any moment: plain attributes, no locks."""

    def __init__(self) -> None:
        self.reason = ""
        self._deadline = float("inf")

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    @property
    def overdue(self) -> bool:
        """The grace is over: leave without waiting for anybody."""
        return time.monotonic() > self._deadline

    def request(self, reason: str, grace_s: float = STOP_GRACE_S) -> None:
        if not self.reason:
            self._deadline = time.monotonic() + grace_s
            self.reason = reason

    def wait(self, timeout_s: float) -> bool:
        """Waits for a request; whether there is one."""
        deadline = time.monotonic() + timeout_s
        while not self.requested and time.monotonic() < deadline:
            time.sleep(_REQUEST_POLL_S)
        return self.requested

    def on_signals(self) -> None:
        """SIGTERM and SIGINT request a stop. Main thread only."""

        def handle(received: int, _frame: FrameType | None) -> None:
            self.request(signal.Signals(received).name)

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)

    def watch_parent(self, parent_pid: int) -> None:
        """Requests a stop when the parent dies, and ends the process by force when the grace is over.

        The force is for a rank that sits in a collective whose peers are gone or stopped: no signal handler runs there.
        """

        def watch() -> None:
            while os.getppid() == parent_pid:
                time.sleep(_PARENT_POLL_S)
            self.request("parent died")
            while not self.overdue:
                time.sleep(_PARENT_POLL_S)
            os._exit(128 + signal.SIGTERM)

        threading.Thread(target=watch, name="watch-parent", daemon=True).start()
