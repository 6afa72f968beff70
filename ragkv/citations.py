"""Which documents an answer names: finding `[n]` markers in text and checking them against what was given."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBERS = r"\d{1,6}(?:\s*(?:,|;|-|–)\s*\d{1,6})*"
_MARKER = re.compile(rf"\[\s*({_NUMBERS})\s*\]")
_RANGE = re.compile(r"(\d+)\s*[-–]\s*(\d+)")
_WIDEST_RANGE = 20


@dataclass(frozen=True)
class Marker:
    """One bracket in an answer, text[start:end], and the document numbers that it names, in order."""

    numbers: tuple[int, ...]
    start: int
    end: int


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
