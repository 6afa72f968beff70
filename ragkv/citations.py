"""Which documents an answer names: finding `[n]` markers in text and checking them against what was given.

In the line that names the documents by title and number, the title decides: a small model that reads many documents
copies titles rightly and numbers wrongly.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

SOURCES_LABEL = "Documents:"

_NUMBERS = r"\d{1,6}(?:\s*(?:,|;|-|–)\s*\d{1,6})*"
_MARKER = re.compile(rf"\[\s*({_NUMBERS})\s*\]")
_RANGE = re.compile(r"(\d+)\s*[-–]\s*(\d+)")
_WIDEST_RANGE = 20
_SOURCES = re.compile(rf"^\s*{SOURCES_LABEL}\s*", re.MULTILINE)
_AROUND_NAMES = " .,;:*_\"'“”–-"


@dataclass(frozen=True)
class Marker:
    """One bracket in an answer, text[start:end], and the document numbers that it names, in order."""

    numbers: tuple[int, ...]
    start: int
    end: int


def cited_numbers(text: str, titles: Sequence[str]) -> tuple[list[int], list[int]]:
    """Numbers of the documents that a text cites, in order of first mention, and numbers that no document has.

    Behind the label of the documents, a number with the title of exactly one document stands for that one.

    Args:
        titles: of the documents 1, 2, ...; empty for those that have none.
    """
    return split_valid([*_by_title(text, find_markers(text), titles)], len(titles))


def named_alone(titles: Sequence[str]) -> list[int]:
    """The documents that a citation can name by title alone: nobody else has it, and it looks like no marker."""
    numbers = _numbers_by(_name, titles)
    return [
        n for n, title in enumerate(titles, 1) if _name(title) and len(numbers[_name(title)]) == 1 and "[" not in title
    ]


def settled(text: str) -> str:
    """The beginning of a text that is still growing whose citations stay as they are, however it goes on."""
    label, markers = _SOURCES.search(text), find_markers(text)
    if label is None or not markers or not _titles_follow(label, markers) or "\n" in text[markers[-1].end :]:
        return text
    return text[: markers[-1].start]  # the title of the last one may not be whole


def _by_title(text: str, markers: Sequence[Marker], titles: Sequence[str]) -> Iterator[Marker]:
    """The markers, and instead of those that stand with a title those of its document."""
    label = _SOURCES.search(text)
    if label is None:
        yield from markers
        return
    numbers, short = _numbers_by(_name, titles), _numbers_by(_short, titles)
    follow = _titles_follow(label, markers)
    borders = [label.end(), *(place for marker in markers for place in (marker.start, marker.end)), len(text)]
    for n, marker in enumerate(markers):
        before, behind = text[max(borders[2 * n], label.end()) : marker.start], text[marker.end : borders[2 * n + 3]]
        name = _name(behind.split("\n")[0] if follow else before.split("\n")[-1])
        found = numbers.get(name) or short.get(name, [])
        known = marker.start >= label.end() and len(marker.numbers) == len(found) == 1 and name
        yield replace(marker, numbers=tuple(found)) if known else marker


def _titles_follow(label: re.Match[str], markers: Sequence[Marker]) -> bool:
    """Whether titles stand behind their numbers, and not before them."""
    return any(marker.start == label.end() for marker in markers)


def _numbers_by(name: Callable[[str], str], titles: Sequence[str]) -> Mapping[str, list[int]]:
    numbers = defaultdict[str, list[int]](list)
    for number, title in enumerate(titles, 1):
        numbers[name(title)].append(number)
    return numbers


def _name(title: str) -> str:
    return " ".join(title.casefold().split()).strip(_AROUND_NAMES)


def _short(title: str) -> str:
    """A title without what tells it from others of the same name, as in "Mercury (planet)"."""
    return _name(re.sub(r"\([^()]*\)\s*$", "", title))


def find_markers(text: str) -> list[Marker]:
    """All citation markers: `[3]`, `[1][2]`, `[1, 4]`, `[2-5]`."""
    return [Marker(_numbers(match[1]), match.start(), match.end()) for match in _MARKER.finditer(text)]


def _numbers(inside: str) -> tuple[int, ...]:
    def expanded(match: re.Match[str]) -> str:
        first, last = int(match[1]), int(match[2])
        if not first <= last < first + _WIDEST_RANGE:
            return f"{first},{last}"
        return ",".join(map(str, range(first, last + 1)))

    numbers = (int(number) for number in re.findall(r"\d+", _RANGE.sub(expanded, inside)))
    return tuple(dict.fromkeys(numbers))


def split_valid(markers: Sequence[Marker], num_documents: int) -> tuple[list[int], list[int]]:
    """The cited numbers in order of first mention, apart by whether a document has that number (1 to num_documents)."""
    cited = dict.fromkeys(number for marker in markers for number in marker.numbers)
    valid = [number for number in cited if 1 <= number <= num_documents]
    return valid, [number for number in cited if not 1 <= number <= num_documents]


def strip_markers(text: str) -> str:
    """The text without its citation markers and the spaces that stood before them."""
    return re.sub(rf"\s*\[\s*{_NUMBERS}\s*\]", "", text).strip()
