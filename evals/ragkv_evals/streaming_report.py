"""What a streaming run says: a row per variant, ratios to recomputation, tables, and log-perplexity by position."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from ragkv_evals.statistics import mean
from ragkv_evals.streaming import Floats, Reading, Recomputed, Steps

BINS = 100


@dataclass(frozen=True)
class Row:
    """One variant.

    Attributes:
        perplexity: over all tokens behind the first full window.
        perplexity_sampled: over the positions at which the window was recomputed as well.
        vs_recompute: that over the perplexity of recomputation there; 1 is as good.
        vs_recompute_low, vs_recompute_high: 95% bootstrap interval of that over the positions.
        positions, log_perplexity: means over equal parts of the text, by the position of each part's middle.
    """

    window: int
    variant: str
    sinks: int
    perplexity: float
    perplexity_sampled: float
    vs_recompute: float
    vs_recompute_low: float
    vs_recompute_high: float
    positions: list[int]
    log_perplexity: list[float]


@dataclass(frozen=True)
class StepsRow:
    """The streaming cache in use, one token at a time.

    Attributes:
        tokens: that were read.
        ms_per_token_early, ms_per_token_late: medians of the first and the last thousand steps on a full window (or of
            a quarter of them all, if that is less).
        slope_percent, slope_error: how much a step takes longer at the end of the text than when the window was first
            full, by a straight line, and the standard error of that.
        cache_bytes_first, cache_bytes_last: when the cache was full for the first time, and at the end.
        largest_difference: of a token's log-likelihood from that of the variant with as many sinks, read in passes.
    """

    window: int
    sinks: int
    tokens: int
    ms_per_token_early: float
    ms_per_token_late: float
    slope_percent: float
    slope_error: float
    cache_bytes_first: int
    cache_bytes_last: int
    largest_difference: float


@dataclass(frozen=True)
class Recompute:
    """A window recomputed for every token. `speedup` is its time over that of a streaming step; both of one stream."""

    window: int
    positions: int
    perplexity: float
    ms_per_token: float
    streaming_ms_per_token: float
    speedup: float


def row(reading: Reading, recomputed: Recomputed) -> Row:
    """The figures of one variant."""
    window = reading.window
    sampled = reading.nll[:, [position - 1 for position in recomputed.positions]]
    more = sampled - np.array(recomputed.nll)
    interval = mean(more.ravel().tolist())
    bins = np.array_split(np.arange(reading.nll.shape[1]), min(BINS, reading.nll.shape[1]))
    return Row(
        window=window,
        variant=reading.name,
        sinks=reading.sinks,
        perplexity=_perplexity(reading.nll[:, window:]),
        perplexity_sampled=_perplexity(sampled),
        vs_recompute=_perplexity(more),
        vs_recompute_low=float(np.exp(interval.low)),
        vs_recompute_high=float(np.exp(interval.high)),
        positions=[int(places.mean()) + 1 for places in bins],
        log_perplexity=[float(reading.nll[:, places].mean()) for places in bins],
    )


def steps_row(steps: Steps, reading: Reading) -> StepsRow:
    """The figures of the cache in use; `reading` is of the same stream, window and sinks."""
    full = steps.step_s[steps.window :]
    part = max(1, min(1000, len(full) // 4))
    slope, error = _slope(full)
    return StepsRow(
        window=steps.window,
        sinks=steps.sinks,
        tokens=len(steps.nll) + 1,
        ms_per_token_early=1000 * float(np.median(full[:part])),
        ms_per_token_late=1000 * float(np.median(full[-part:])),
        slope_percent=slope,
        slope_error=error,
        cache_bytes_first=steps.cache_bytes[0],
        cache_bytes_last=steps.cache_bytes[1],
        largest_difference=float(np.abs(steps.nll - reading.nll[0]).max()),
    )


def recompute_row(recomputed: Recomputed) -> Recompute:
    """The figures of recomputation."""
    seconds, streaming = float(np.median(recomputed.seconds)), float(np.median(recomputed.streaming_seconds))
    return Recompute(
        window=recomputed.window,
        positions=len(recomputed.positions),
        perplexity=_perplexity(recomputed.nll),
        ms_per_token=1000 * seconds,
        streaming_ms_per_token=1000 * streaming,
        speedup=seconds / streaming,
    )


def _perplexity(nll: Floats | Sequence[Sequence[float]]) -> float:
    return float(np.exp(np.mean(nll)))


def _slope(steps: Floats) -> tuple[float, float]:
    """Rise of a straight line through the steps over their whole length, in percent of its beginning; standard error.

    The slowest and fastest 2% are left out: what else runs on the machine is no property of the cache.
    """
    low, high = np.quantile(steps, (0.02, 0.98))
    at = np.flatnonzero((steps >= low) & (steps <= high))
    if len(at) < 3:
        return 0.0, 0.0
    x = at / len(steps)
    (rise, start), covariance = np.polyfit(x, steps[at], 1, cov=True)
    return 100 * float(rise / start), 100 * float(np.sqrt(covariance[0, 0]) / start)


HEADER = ("window", "variant", "perplexity", "at samples", "vs recompute", "ms early", "ms late", "rise %", "MiB")


def table(
    rows: Sequence[Row], token_by_token: Sequence[StepsRow], recomputed: Sequence[Recompute]
) -> list[tuple[str, ...]]:
    """The lines below `HEADER`."""
    lines = []
    for steps, again in zip(token_by_token, recomputed, strict=True):
        lines += [_line(each) for each in rows if each.window == again.window]
        lines.append(_steps_line(steps))
        speed = f"{again.ms_per_token:.1f} ({again.speedup:.1f}x of {again.streaming_ms_per_token:.1f})"
        lines.append((str(again.window), "recomputation", "", f"{again.perplexity:.2f}", "1.000", speed, "", "", ""))
    return lines


def _line(each: Row) -> tuple[str, ...]:
    return (
        str(each.window),
        each.variant,
        f"{each.perplexity:.2f}",
        f"{each.perplexity_sampled:.2f}",
        f"{each.vs_recompute:.3f} ({each.vs_recompute_low:.3f} to {each.vs_recompute_high:.3f})",
        *[""] * 4,
    )


def _steps_line(each: StepsRow) -> tuple[str, ...]:
    return (
        str(each.window),
        f"token by token, {each.sinks} sinks",
        *[""] * 3,
        f"{each.ms_per_token_early:.1f}",
        f"{each.ms_per_token_late:.1f}",
        f"{each.slope_percent:+.1f} ± {each.slope_error:.1f}",
        f"{each.cache_bytes_last / 2**20:.1f}",
    )


def rich_table(lines: Sequence[Sequence[str]], title: str) -> Table:
    """For a terminal."""
    shown = Table(title=title)
    for index, name in enumerate(HEADER):
        shown.add_column(name, justify="left" if index == 1 else "right")
    for line in lines:
        shown.add_row(*line)
    return shown


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """For a README."""
    rules = ("--:", ":--", *["--:"] * (len(HEADER) - 2))
    return "".join(f"| {' | '.join(line)} |\n" for line in (HEADER, rules, *lines))


def plot(rows: Sequence[Row], file: Path, trained: int) -> None:
    """Log-perplexity against position, one panel per window; a line marks the length that the model was trained for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    windows = sorted({each.window for each in rows})
    figure, panels = pyplot.subplots(1, len(windows), figsize=(6 * len(windows), 4), squeeze=False, sharey=True)
    for panel, window in zip(panels[0], windows, strict=True):
        for each in (each for each in rows if each.window == window):
            panel.plot(each.positions, each.log_perplexity, label=each.variant, linewidth=1)
        if trained < max(each.positions[-1] for each in rows):
            panel.axvline(trained, color="grey", linestyle=":", linewidth=1)
        panel.set(title=f"window of {window} tokens", xlabel="position")
    panels[0][0].set_ylabel("log-perplexity")
    panels[0][-1].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
