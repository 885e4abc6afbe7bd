"""ReadAhead: makes things ahead in a thread, in order, within a bound on the bytes they hold."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# Without a bound on bytes: the item in use, and the next one.
_ITEMS_WITHOUT_BOUND = 2


@dataclass(frozen=True)
class Job[T]:
    """Something to make, and the bytes that it will hold.

    Attributes:
        num_bytes: Bytes, at most.
        build: Makes it.
    """

    num_bytes: int
    build: Callable[[], T]


@dataclass(frozen=True, eq=False)
class Held[T]:
    """Something that was made, whose bytes count until it is given back."""

    item: T
    num_bytes: int


class ReadAhead[T]:
    """Does jobs in one thread, in order, while the bytes of what is held stay within a bound.

    What was taken counts until it is released; release it before waiting for the next one.

    Args:
        jobs: Iterated in the thread, like all that it reads from.
        max_bytes: Most bytes that may be held; None for one item more than the one in use.

    Attributes:
        peak_bytes: Most bytes that were held at a time.
    """

    def __init__(self, jobs: Iterable[Job[T]], *, max_bytes: int | None) -> None:
        self.peak_bytes = 0
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._ready: deque[Held[T]] = deque()
        self._held_items = self._held_bytes = 0
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._thread = threading.Thread(
            target=self._work, args=(jobs,), name="trace-prefetch", daemon=True
        )
        self._thread.start()

    def take(self, *, wait: bool = True) -> Held[T] | None:
        """Gives the next item; None after the last one.

        Args:
            wait: Whether to wait for it; if not, None also says that it is not there yet.

        Raises:
            BaseException: What making this item raised; of a bound that it exceeds, ValueError.
        """
        with self._changed:
            while wait and not (self._ready or self._ended):
                self._changed.wait()
            if self._ready:
                return self._ready.popleft()
            if wait and self._error is not None:
                raise self._error
            return None

    def release(self, held: Held[T]) -> None:
        """Says that the memory of an item that was taken is free again."""
        with self._changed:
            self._held_items -= 1
            self._held_bytes -= held.num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, after the item that it is making."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _work(self, jobs: Iterable[Job[T]]) -> None:
        error = None
        try:
            for job in jobs:
                if not self._reserve(job.num_bytes):
                    break
                held = Held(job.build(), job.num_bytes)
                # Nothing of it may outlive its use by waiting here for the next one.
                del job
                self._give(held)
                del held
        except BaseException as raised:  # noqa: BLE001  `take` raises it in the consumer's thread.
            error = raised
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _reserve(self, num_bytes: int) -> bool:
        """Waits until so many bytes may be held; gives False if nobody wants them any more."""
        require_within(num_bytes, self._max_bytes)
        with self._changed:
            while not self._closed and self._is_full(num_bytes):
                self._changed.wait()
            self._held_items += 1
            self._held_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
            return not self._closed

    def _is_full(self, num_bytes: int) -> bool:
        if self._max_bytes is None:
            return self._held_items >= _ITEMS_WITHOUT_BOUND
        return self._held_bytes + num_bytes > self._max_bytes

    def _give(self, held: Held[T]) -> None:
        with self._changed:
            if not self._closed:
                self._ready.append(held)
            self._changed.notify_all()


def require_within(num_bytes: int, max_bytes: int | None) -> None:
    """Raises ValueError if a micro-batch's hints alone exceed the bound."""
    if max_bytes is not None and num_bytes > max_bytes:
        raise ValueError(
            f"the hints of a micro-batch take {num_bytes} bytes, but at most {max_bytes} may be "
            "held; raise the bound (--trace-hint-memory-mb), or make micro-batches smaller "
            "(--micro-batch-size)"
        )
