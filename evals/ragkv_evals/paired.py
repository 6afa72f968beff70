"""Ways to read a prompt, compared example by example: means, paired differences to a baseline, and what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.table import Table

from ragkv_evals import statistics


@dataclass(frozen=True)
class Answered:
    """One example answered in one mode.

    Attributes:
        ttft_s: seconds to read the prompt, of modes that share a pass those of that pass; None if an earlier example
            had read a part of it, which the mode has no claim to.
        computed_tokens: tokens of the prompt that were computed for the question.
    """

    example: str
    mode: str
    reply: str
    figures: Mapping[str, float]
    ttft_s: float | None
    prompt_tokens: int
    computed_tokens: int


@dataclass(frozen=True)
class Row:
    """One mode over all examples.

    Attributes:
        figures: means.
        differences: to the baseline, example by example, with the bounds of their 95% intervals over clusters.
        ttft_s: median of the examples that have one; None if none has.
        speedup: median time to first token of the baseline, over that of this mode; None if one of them has none.
        computed_share: mean share of the prompts' tokens that were computed.
    """

    mode: str
    examples: int
    figures: dict[str, float]
    differences: dict[str, statistics.Estimate]
    ttft_s: float | None
    speedup: float | None
    computed_share: float


def rows(
    answered: Sequence[Answered], names: Sequence[str], baseline: str, clusters: Mapping[str, str] | None = None
) -> list[Row]:
    """One row per mode; only figures that every example has.

    Args:
        clusters: names what each example depends on, such as the document set that others are about, too; None takes
            all to be independent.
    """
    by_mode: dict[str, list[Answered]] = {}
    for each in answered:
        by_mode.setdefault(each.mode, []).append(each)
    shared = [name for name in names if all(name in each.figures for each in answered)]
    return [_row(mode, each, by_mode[baseline], shared, clusters) for mode, each in by_mode.items()]


def _row(
    mode: str,
    answered: Sequence[Answered],
    baseline: Sequence[Answered],
    names: Sequence[str],
    clusters: Mapping[str, str] | None,
) -> Row:
    drawn = [each.example if clusters is None else clusters[each.example] for each in answered]

    def figures(name: str, of: Sequence[Answered]) -> list[float]:
        return [each.figures[name] for each in of]

    mine, other = _seconds(answered), _seconds(baseline)
    return Row(
        mode=mode,
        examples=len(answered),
        figures={name: fmean(figures(name, answered)) for name in names},
        differences={
            name: statistics.clustered_difference(figures(name, answered), figures(name, baseline), drawn)
            for name in names
        },
        ttft_s=mine,
        speedup=other / mine if mine and other else None,
        computed_share=fmean(each.computed_tokens / each.prompt_tokens for each in answered),
    )


def _seconds(answered: Sequence[Answered]) -> float | None:
    timed = [each.ttft_s for each in answered if each.ttft_s is not None]
    return median(timed) if timed else None


def _header(found: Sequence[Row]) -> tuple[str, ...]:
    return ("mode", *found[0].figures, "first token s", "speed-up", "computed")


def _texts(row: Row) -> tuple[str, ...]:
    figures = [f"{mean:.3f} ({_difference(row.differences[name])})" for name, mean in row.figures.items()]
    times = ["" if number is None else f"{number:.3g}" for number in (row.ttft_s, row.speedup)]
    return (row.mode, *figures, *times, f"{row.computed_share:.0%}")


def _difference(found: statistics.Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:+.3f}, {found.clusters} cluster{'s' if found.clusters > 1 else ''}"
    return f"{found.value:+.3f}, {found.low:+.3f} to {found.high:+.3f}"


def rich_table(found: Sequence[Row], title: str) -> Table:
    """For a terminal."""
    table = Table(*_header(found), title=title)
    for row in found:
        table.add_row(*_texts(row))
    return table


def markdown_table(found: Sequence[Row]) -> str:
    """For a README."""
    header = _header(found)
    lines = [header, (":--", *["--:"] * (len(header) - 1)), *map(_texts, found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
