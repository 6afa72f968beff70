"""A document: text with an id that citations, indexes and caches can rely on.

The id is the caller's, or a hash of source, title and text, so the same content always has the same id.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from ragkv.errors import DocumentError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


@dataclass(frozen=True)
class Document:
    """One citable text.

    Args:
        id: unique within a collection; an empty one is replaced by a hash of source, title and text.
        text: the words a model reads.
        title: what a reader is shown next to the citation; may be empty.
        source: where the text comes from (a path, an address); may be empty.
        metadata: JSON values that travel along and are not read by ragkv.
    """

    id: str
    text: str
    title: str = ""
    source: str = ""
    metadata: Mapping[str, JSON] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.id:
            content = json.dumps([self.source, self.title, self.text]).encode("ascii")
            object.__setattr__(self, "id", hashlib.sha256(content).hexdigest()[:16])

    def to_row(self) -> dict[str, JSON]:
        """The document as one JSON object, read back by `parse_row`."""
        return {**vars(self), "metadata": dict(self.metadata)}


def parse_row(row: Mapping[str, JSON], where: str, source: str = "") -> Document:
    """A document from a JSON object: "text", perhaps "id", "title", "source"; other fields become metadata.

    An object under "metadata" is metadata too. `source` is used when the row names none.

    Raises:
        DocumentError: a field is missing or of the wrong type; `where` names the row.
    """
    if not isinstance(row.get("text"), str):
        raise DocumentError(f'{where}: no "text" (a string): add one to this row')
    named = {"id": row.get("id"), "title": row.get("title"), "source": row.get("source")}
    if type(named["id"]) is int:
        named["id"] = str(named["id"])
    for name, value in named.items():
        if not isinstance(value, str | None):
            raise DocumentError(f'{where}: "{name}" is {json.dumps(value)[:40]}: make it a string')
    metadata = {name: value for name, value in row.items() if name not in {"text", *named}}
    if isinstance(inner := metadata.get("metadata"), dict):
        metadata = {**inner, **{name: value for name, value in metadata.items() if name != "metadata"}}
    identity, title, origin = (cast("str | None", value) or "" for value in named.values())
    return Document(identity, cast(str, row["text"]), title, origin or source, metadata)


def unique(documents: Iterable[Document]) -> list[Document]:
    """The documents in their order, exact repeats left out.

    Raises:
        DocumentError: one id stands for two different documents, so a citation of it would be ambiguous.
    """
    seen: dict[str, Document] = {}
    for document in documents:
        first = seen.setdefault(document.id, document)
        if first != document:
            origins = " and ".join(dict.fromkeys(d.source or repr(d.text[:40]) for d in (first, document)))
            raise DocumentError(f'two documents have the id "{document.id}" ({origins}): give each its own id')
    return list(seen.values())
