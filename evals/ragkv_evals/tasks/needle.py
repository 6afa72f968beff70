"""A needle in a haystack: one sentence at a given depth of a book of a given length, and a question for it."""

import random
from collections.abc import Sequence
from pathlib import Path

from ragkv.errors import DocumentError
from ragkv_evals.tasks.base import Example, Layout, Task
from ragkv_evals.tasks.plain import contains, pieces

GET = "Give a UTF-8 text file, or a folder of .txt files, long enough for the longest haystack."
CASES = 1000
DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)
CITIES = ("Lisbon", "Nairobi", "Quito", "Oslo", "Hanoi", "Tunis", "Riga", "Lima", "Kyoto", "Tbilisi", "Accra", "Perth")


class Haystacks:
    """Paragraphs of a text from a seeded place on, with a needle between two of them."""

    def __init__(self, paragraphs: Sequence[str]) -> None:
        self.ids: Sequence[str] = [str(number) for number in range(CASES)]
        self._paragraphs = paragraphs

    def build(self, index: int, layout: Layout) -> Example:
        """The needle's case number `index`.

        Raises:
            DocumentError: the text is too short, or not even the needle fits.
        """
        if layout.context_tokens is None:
            raise DocumentError("--context-tokens is missing: say how long the haystack is, such as 4096,8192")
        rng = random.Random(f"{layout.seed} {index}")  # noqa: S311 (a draw, not a secret)
        city, number = rng.choice(CITIES), str(rng.randrange(1_000_000, 10_000_000))
        what = f"special magic number for {city} mentioned in the text above"
        question, start = f"What is the {what}?", f"The {what} is"
        needle = f"One of the special magic numbers for {city} is: {number}.\n\n"
        used = layout.counter.frame(question, None) + layout.counter.text(start) + layout.counter.text(needle)
        hay, ends = self._hay(layout.context_tokens - used, layout, rng)
        wanted = ends[-1] * (layout.depth or 0.0) / 100
        at = min(range(len(ends)), key=lambda i: abs(ends[i] - wanted))
        return Example(
            id=self.ids[index],
            question=question,
            documents=pieces(["".join(hay[:at]), needle, "".join(hay[at:])]),
            gold=(2,),
            answers=((number,),),
            prompt=None,
            reply_start=start,
        )

    def _hay(self, room: int, layout: Layout, rng: random.Random) -> tuple[list[str], list[int]]:
        """Paragraphs of together at most `room` tokens, and the tokens before each of them and behind the last."""
        start = rng.randrange(len(self._paragraphs))
        hay: list[str] = []
        ends = [0]
        for step in range(len(self._paragraphs)):
            paragraph = self._paragraphs[(start + step) % len(self._paragraphs)]
            end = ends[-1] + layout.counter.text(paragraph)
            if end > room:
                return hay, ends
            hay.append(paragraph)
            ends.append(end)
        short = room - ends[-1]
        raise DocumentError(f"the text is {short} tokens too short for --context-tokens {layout.context_tokens}. {GET}")


def read(data: Path | None) -> list[str]:
    """The paragraphs of a text file, or of all text files of a folder in the order of their names."""
    if data is None:
        raise DocumentError(f"--data is missing. {GET}")
    files = sorted(data.glob("*.txt")) if data.is_dir() else [data]
    try:
        texts = [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"--data {data}: cannot be read ({error}). {GET}") from error
    paragraphs = [f"{' '.join(part.split())}\n\n" for text in texts for part in text.split("\n\n") if part.strip()]
    if not paragraphs:
        raise DocumentError(f"--data {data}: holds no text. {GET}")
    return paragraphs


NEEDLE = Task(
    name="needle",
    help="One sentence in a book, at every depth and length.",
    open=lambda data: Haystacks(read(data)),
    score=contains,
    headline=("accuracy",),
    max_tokens=16,
    depths=DEPTHS,
    has_documents=False,
)
