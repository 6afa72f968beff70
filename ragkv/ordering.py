"""An order of retrieved documents that changes little from question to question, so that their prompts begin alike.

Retrievers rank afresh for every question; two prompts with the same documents in another order share no K/V. Ordered by
how often each was retrieved before, sets that overlap in their popular documents share these as one exact prefix.
"""

import threading
from collections.abc import Mapping, Sequence


def popular_first(ids: Sequence[str], uses: Mapping[str, int]) -> list[int]:
    """Positions of the ids in a stable order: most uses first; among equals, who was first in `uses`; new ones last.

    Args:
        ids: documents, best first; new ones stay in this order.
        uses: how often each document was retrieved before, in the order of their first retrieval.
    """
    age = {identity: number for number, identity in enumerate(uses)}
    return sorted(range(len(ids)), key=lambda n: (-uses.get(ids[n], 0), age.get(ids[n], len(age))))


class PopularFirst:
    """Counts retrievals, and orders by them. Threads may share one; give each collection of documents its own."""

    def __init__(self) -> None:
        self._uses: dict[str, int] = {}
        self._lock = threading.Lock()

    def positions(self, ids: Sequence[str]) -> list[int]:
        """See `popular_first`; nothing is counted."""
        with self._lock:
            return popular_first(ids, self._uses)

    def count(self, ids: Sequence[str]) -> None:
        """Note that these documents stand in a prompt, in this order."""
        with self._lock:
            for identity in ids:
                self._uses[identity] = self._uses.get(identity, 0) + 1
