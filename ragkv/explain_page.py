"""Explanations as one HTML page that needs nothing from outside: no scripts, no fonts, no addresses.

Whatever comes from documents, questions or answers is escaped by jinja2; a content security policy, which allows this
page's own style sheet and nothing else, stands behind that.
"""

import base64
import hashlib
import math
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.filesize import decimal

from ragkv.documents import Document
from ragkv.explain import Explanation, Piece

LEVELS = 9


def render(explanations: Sequence[Explanation], documents: Sequence[Document], *, model: str, policy: str) -> str:
    """The page: one column for each question over the same documents.

    Args:
        explanations: of questions about these documents.
        documents: in the order of the prompts.
        model, policy: names for the heading.
    """
    environment = Environment(
        loader=PackageLoader("ragkv"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(bytes=decimal, level=level, runs=runs)
    css = environment.get_template("explain.css").render()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return environment.get_template("explain.html").render(
        style_hash=f"sha256-{digest}",
        columns=[
            {"label": f"Q{number}" if len(explanations) > 1 else "", "explanation": explanation}
            for number, explanation in enumerate(explanations, 1)
        ],
        documents=documents,
        levels=range(LEVELS + 1),
        model=model,
        policy=policy,
    )


def level(share: float) -> int:
    """The shade of a share between 0 and 1: 0 only for nothing, 9 only for nearly all."""
    return math.ceil(round(LEVELS * share, 6))


def runs(pieces: Sequence[Piece], heads: int) -> list[tuple[int, str]]:
    """(shade, text) of the pieces, neighbours of one shade joined, without the white space at the end."""
    joined: list[tuple[int, str]] = []
    for piece in pieces:
        shade = level(piece.kept / heads) if heads else 0
        if joined and joined[-1][0] == shade:
            joined[-1] = (shade, joined[-1][1] + piece.text)
        else:
            joined.append((shade, piece.text))
    while joined and not joined[-1][1].rstrip():
        joined.pop()
    if joined:
        joined[-1] = (joined[-1][0], joined[-1][1].rstrip())
    return joined
