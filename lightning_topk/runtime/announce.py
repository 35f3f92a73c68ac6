"""What a user is told while training runs: on rank 0, and once."""

from __future__ import annotations

from collections.abc import Callable


class Announcer:
    """Tells the user something, on rank 0 and once.

    Args:
        tell: Is called with each message.
        rank: This rank.
        said: Messages that were told before; this object adds to it.
    """

    def __init__(self, tell: Callable[[str], None], rank: int, said: set[str] | None = None) -> None:
        self._tell, self._rank = tell, rank
        self.said: set[str] = set() if said is None else said

    def __call__(self, message: str) -> None:
        """Tells a message, unless it was told before."""
        if self._rank == 0 and message not in self.said:
            self._tell(message)
        self.said.add(message)
