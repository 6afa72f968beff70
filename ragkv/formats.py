"""The bytes of one file as documents: plain text, Markdown, HTML, PDF and JSON lines.

A file that cannot be read whole and without guessing is an error that says what to do with it.
"""

import json
import re
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import NoReturn

from bs4 import BeautifulSoup
from bs4.dammit import EncodingDetector
from bs4.element import NavigableString, PageElement, Tag
from pypdf import PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError

from ragkv.documents import JSON, Document, parse_row
from ragkv.errors import DocumentError

PARAGRAPH_TAGS = [
    *["address", "article", "aside", "blockquote", "body", "dd", "div", "dl", "dt", "fieldset", "figure"],
    *["figcaption", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol"],
    *["p", "pre", "section", "table", "ul"],
]
LINE_TAGS = ["br", "li", "option", "tr"]
CELL_TAGS = ["td", "th"]
TAG_BORDERS = {
    **dict.fromkeys(PARAGRAPH_TAGS, "\n\n"),
    **dict.fromkeys(LINE_TAGS, "\n"),
    **dict.fromkeys(CELL_TAGS, " "),
}
INVISIBLE_TAGS = {"script", "style", "template", "title"}


def read_file(path: Path) -> list[Document]:
    """The documents of one file; its suffix, in any case, is a key of `READERS`.

    Raises:
        DocumentError: the file cannot be read, holds no text, or is not what its suffix says.
    """
    if not path.is_file():
        raise DocumentError(f"{path}: not a regular file, or a broken link: remove or replace it")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}: check the file and its permissions") from error
    documents = READERS[path.suffix.lower()](data, path)
    if not documents:
        raise DocumentError(f"{path}: empty document: fill or remove it")
    return documents


def _decode(data: bytes, path: Path, encoding: str = "utf-8") -> str:
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        name = encoding.upper()
        raise DocumentError(f"{path}: not {name} text (byte {error.start}): save it as UTF-8") from error
    except (LookupError, ValueError) as error:
        raise DocumentError(f"{path}: unknown character set {encoding!r}: save it as UTF-8") from error
    if "\0" in text:
        offset = data.index(b"\0") if b"\0" in data else 0
        raise DocumentError(f"{path}: binary or UTF-16 file (NUL at byte {offset}): save it as UTF-8 text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _whole(text: str, title: str, path: Path) -> list[Document]:
    if not text.strip():
        return []
    return [Document("", text, title or path.stem, path.as_posix())]


def _read_text(data: bytes, path: Path) -> list[Document]:
    return _whole(_decode(data, path), "", path)


def _read_markdown(data: bytes, path: Path) -> list[Document]:
    text = _decode(data, path)
    heading = re.match(r"\s*#[ \t]+(.+)", text)
    return _whole(text, heading[1].strip(" \t#") if heading else "", path)


def _read_html(data: bytes, path: Path) -> list[Document]:
    declared = EncodingDetector.find_declared_encoding(data, is_html=True)
    soup = BeautifulSoup(_decode(data, path, declared or "utf-8"), "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    return _whole(_visible_text(soup), title, path)


def _visible_text(soup: BeautifulSoup) -> str:
    """Text as a browser lays it out: white space folded except in <pre>, blocks on lines of their own."""
    pieces: list[str] = []
    pending: list[tuple[PageElement | str, bool]] = [(soup, False)]
    while pending:  # a stack of its own: pages may be nested deeper than Python recurses
        node, in_pre = pending.pop()
        if isinstance(node, Tag) and node.name not in INVISIBLE_TAGS:
            border = TAG_BORDERS.get(node.name, "")
            pieces.append(border)
            pending.append(("" if border == "\n" else border, False))  # a line tag only begins a line
            pending += [(child, in_pre or node.name == "pre") for child in reversed(node.contents)]
        elif type(node) is str:
            pieces.append(node)
        elif type(node) is NavigableString:  # not a comment or doctype
            # No NUL can be in the text: it stands for the blanks of <pre> while all others are folded.
            pieces.append(node.expandtabs(4).replace(" ", "\0") if in_pre else re.sub(r"\s+", " ", node))
    text = re.sub(r" *\n *", "\n", re.sub(r" +", " ", "".join(pieces)))
    return re.sub(r"\n{3,}", "\n\n", text).strip().replace("\0", " ")


def _read_pdf(data: bytes, path: Path) -> list[Document]:
    try:
        reader = PdfReader(BytesIO(data))
        pages = [page.extract_text() for page in reader.pages]
        title = (reader.metadata.title if reader.metadata else None) or ""
    except (FileNotDecryptedError, DependencyError) as error:
        raise DocumentError(f"{path}: encrypted PDF: save a copy without a password") from error
    except Exception as error:  # a damaged file makes pypdf trip over anything
        raise DocumentError(f"{path}: damaged PDF ({_one_line(error)}): export or download it again") from error
    if not any(page.strip() for page in pages):
        raise DocumentError(f"{path}: PDF without text (scanned pages?): run it through OCR first")
    return _whole(_repaired("\n\n".join(pages)), _repaired(title).strip(), path)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]


def _repaired(text: str) -> str:
    """Text of a PDF's own encodings: surrogate pairs joined, lone ones replaced, NUL left out."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "")


def _read_jsonl(data: bytes, path: Path) -> list[Document]:
    documents: list[Document] = []
    # Only "\n" ends a row: str.splitlines would also cut at U+2028, which JSON strings may hold.
    for number, line in enumerate(_decode(data, path).split("\n"), 1):
        if line.strip():
            documents += _parse_line(line, f"{path}, line {number}", path.as_posix())
    return documents


def _parse_line(line: str, where: str, source: str) -> list[Document]:
    try:
        row: JSON = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: not JSON ({_one_line(error)}): write one JSON object a line") from error
    if not isinstance(row, dict):
        raise DocumentError(f'{where}: not a JSON object: write {{"text": "..."}}')
    rows = _paragraph_rows(row, where) if "paragraphs" in row and "text" not in row else iter([row])
    documents = [parse_row(each, where, source) for each in rows]
    for document in documents:
        if not document.text.strip():
            raise DocumentError(f"{where}: empty document: fill or remove it")
        if re.search("[\ud800-\udfff]", document.id + document.text + document.title + document.source):
            raise DocumentError(f"{where}: half a surrogate pair in a string: write the whole character")
    return documents


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _paragraph_rows(row: dict[str, JSON], where: str) -> Iterator[dict[str, JSON]]:
    """The paragraphs of a HotpotQA question, one row each, sentences joined as they stand."""
    paragraphs = row["paragraphs"]
    for paragraph in paragraphs if isinstance(paragraphs, list) else [paragraphs]:
        sentences = paragraph.get("sentences") if isinstance(paragraph, dict) else None
        if not isinstance(paragraph, dict) or not isinstance(sentences, list):
            raise DocumentError(f'{where}: "paragraphs" must be objects with "title" and "sentences"')
        if not all(isinstance(sentence, str) for sentence in sentences):
            raise DocumentError(f'{where}: "sentences" must be strings')
        yield {"title": paragraph.get("title"), "text": "".join(map(str, sentences))}


READERS: dict[str, Callable[[bytes, Path], list[Document]]] = {
    ".txt": _read_text,
    ".md": _read_markdown,
    ".html": _read_html,
    ".htm": _read_html,
    ".pdf": _read_pdf,
    ".jsonl": _read_jsonl,
}
