"""How many captured bytes may be under way: what does not fit waits outside SGLang's queue, so nothing ever blocks. No I/O."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Admission(Generic[T]):
    """First come, first served within `limit_bytes`; one item larger than that passes alone."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._under_way: dict[str, int] = {}
        self._waiting: deque[tuple[str, int, T]] = deque()

    @property
    def bytes_under_way(self) -> int:
        return sum(self._under_way.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def offer(self, name: str, num_bytes: int, item: T) -> None:
        self._waiting.append((name, num_bytes, item))

    def admit(self) -> list[T]:
        """The items that may start now, in their order."""
        admitted = []
        free = self.limit_bytes - self.bytes_under_way
        while self._waiting and (self._waiting[0][1] <= free or not self._under_way):
            name, num_bytes, item = self._waiting.popleft()
            self._under_way[name] = num_bytes
            free -= num_bytes
            admitted.append(item)
        return admitted

    def end(self, name: str) -> None:
        """Its bytes are published or given up. Unknown names are ended already."""
        self._under_way.pop(name, None)

    def abort(self, matches: Callable[[str], bool]) -> list[T]:
        """Ends matching items under way; returns the matching ones that waited, which no longer do."""
        for name in [name for name in self._under_way if matches(name)]:
            self.end(name)
        given_up = [item for name, _, item in self._waiting if matches(name)]
        self._waiting = deque(entry for entry in self._waiting if not matches(entry[0]))
        return given_up
