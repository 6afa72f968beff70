"""The charts of a study, each a PNG with a sentence that says what it shows; those without data are left out."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ragkv_evals.records import Outcome, Record
from ragkv_evals.report.heatmap import heatmaps
from ragkv_evals.report.study import Study
from ragkv_evals.report.style import family, figure, legend, look, png, title
from ragkv_evals.statistics import FEWEST_CLUSTERS, Estimate
from ragkv_evals.summary import estimate, values
from ragkv_evals.variants import FULL

_BINS = 5
_BANDS = (
    "Bands are 95% confidence intervals over clusters (document sets, or cases); "
    f"there are none for fewer than {FEWEST_CLUSTERS}."
)


@dataclass(frozen=True)
class Chart:
    """A chart: the stem of its file, what it shows, and the PNG."""

    name: str
    caption: str
    image: bytes


def charts(study: Study) -> Iterator[Chart]:
    """All charts for which the study has data."""
    for length in study.lengths:
        if len(_budgets(study, length)) > 1:
            yield _against_budget(study, length)
    if len(study.lengths) > 1:
        yield _against_length(study)
        yield _costs(study)
    if any(len(record.outcome.documents_kept) > 1 for record in study.records) and study.task.has_documents:
        yield _against_position(study)
    if study.task.has_layout and len({record.depth for record in study.records}) > 1:
        headline = study.task.headline[0]
        yield Chart(
            "depth",
            f"{title(headline).capitalize()} by the depth of the gold text and the length of the prompt.",
            heatmaps(study, headline),
        )


def _budgets(study: Study, length: int | None) -> dict[str, list[tuple[float, str]]]:
    """By family, (entries kept, policy) at this length, ascending."""
    found: dict[str, list[tuple[float, str]]] = {}
    for policy in study.policies:
        kept = [k for r in study.where(policy, length) if (k := r.outcome.kept_tokens) is not None]
        if kept:
            found.setdefault(family(policy), []).append((median(kept), policy))
    return {name: sorted(points) for name, points in found.items()}


def _middle(records: Sequence[Record], value: Callable[[Outcome], float | None]) -> float:
    """The median of those that have the value; NaN, at which nothing is drawn, if none has."""
    found = [number for record in records if (number := value(record.outcome)) is not None]
    return median(found) if found else math.nan


def _against_budget(study: Study, length: int | None) -> Chart:
    names = study.task.headline
    made, axes = figure(len(names))
    budgets = _budgets(study, length)
    for name, one in zip(names, axes, strict=True):
        for kind, points in budgets.items():
            intervals = [estimate(study.where(policy, length), name) for _, policy in points]
            if kind == FULL:
                _level(one, intervals[0])
            else:
                _line(one, [kept for kept, _ in points], intervals, kind, list(budgets))
        one.set(xlabel="entries kept per KV head", ylabel=title(name), ylim=(0, None))
        _log_ticks(one, [kept for kind, points in budgets.items() if kind != FULL for kept, _ in points])
    legend(made, axes[0])
    tokens = round(_middle([r for r in study.records if r.context_tokens == length], lambda o: o.prompt_tokens))
    caption = f"Quality against what is kept of prompts of about {tokens:,} tokens. {_BANDS}"
    return Chart(f"budget-{length or 'own'}", caption, png(made))


def _level(axes: Axes, estimate: Estimate) -> None:
    if estimate.low is not None and estimate.high is not None:
        axes.axhspan(estimate.low, estimate.high, color="#1c1b19", alpha=0.08, linewidth=0)
    axes.axhline(estimate.value, color="#1c1b19", linewidth=1.2, label="full")


def _line(axes: Axes, xs: Sequence[float], ys: Sequence[Estimate], kind: str, kinds: Sequence[str]) -> None:
    style = look(kinds, kind)
    lows = [math.nan if y.low is None else y.low for y in ys]  # nothing is drawn at NaN
    highs = [math.nan if y.high is None else y.high for y in ys]
    if len(xs) == 1:
        ends = [[ys[0].value - lows[0]], [highs[0] - ys[0].value]]
        axes.errorbar(xs, [ys[0].value], ends, color=style["color"], linewidth=1, capsize=3)
    axes.plot(xs, [y.value for y in ys], label=kind, linewidth=1.6, markersize=4, **style)  # type: ignore[arg-type]
    axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.08, linewidth=0)


def _log_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(ticks)))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.0f}"))


def _against_length(study: Study) -> Chart:
    names = study.task.headline
    made, axes = figure(len(names))
    for name, one in zip(names, axes, strict=True):
        for policy in study.policies:
            lengths = [length for length in study.lengths if values(study.where(policy, length), name)]
            intervals = [estimate(study.where(policy, length), name) for length in lengths]
            _line(one, [length or 0 for length in lengths], intervals, policy, study.policies)
        one.set(xlabel="tokens of the prompt", ylabel=title(name), ylim=(0, None))
        _log_ticks(one, [length or 0 for length in study.lengths])
    legend(made, axes[0])
    return Chart("length", f"Quality against the length of the prompt. {_BANDS}", png(made))


def _costs(study: Study) -> Chart:
    costs: dict[str, Callable[[Outcome], float | None]] = {
        "KV cache after the prefill, MiB": lambda outcome: outcome.kv_bytes_kept and outcome.kv_bytes_kept / 2**20,
        "decoding, ms per token": lambda o: 1000 / o.decode_tokens_per_s if o.decode_tokens_per_s else None,
        "time to first token (shared prefill), s": lambda outcome: outcome.ttft_s,
    }
    made, axes = figure(len(costs))
    for (name, cost), one in zip(costs.items(), axes, strict=True):
        for policy in study.policies:
            lengths = [length for length in study.lengths if study.where(policy, length)]
            heights = [_middle(study.where(policy, length), cost) for length in lengths]
            style = look(study.policies, policy)
            one.plot([n or 0 for n in lengths], heights, label=policy, markersize=4, **style)  # type: ignore[arg-type]
        one.set(xlabel="tokens of the prompt", ylabel=name, ylim=(0, None))
        _log_ticks(one, [length or 0 for length in study.lengths])
    legend(made, axes[0])
    return Chart("costs", "Memory and time against the length of the prompt; medians.", png(made))


def _against_position(study: Study) -> Chart:
    names = study.task.headline
    made, axes = figure(len(names))
    for name, one in zip(names, axes, strict=True):
        for policy in study.policies:
            records = [r for r in study.records if r.outcome.policy == policy and _placed(r) and name in r.figures]
            bins = [[r for r in records if _bin(r) == number] for number in range(_BINS)]
            filled = [number for number, found in enumerate(bins) if found]
            xs = [100 * (number + 0.5) / _BINS for number in filled]
            _line(one, xs, [estimate(bins[number], name) for number in filled], policy, study.policies)
        one.set(xlabel="mean place of the gold documents, %", ylabel=title(name), ylim=(0, None), xlim=(0, 100))
    legend(made, axes[0])
    return Chart("position", f"Quality against where the gold documents stand. {_BANDS}", png(made))


def _placed(record: Record) -> bool:
    return bool(record.gold and record.outcome.documents_kept)


def _bin(record: Record) -> int:
    share = (fmean(record.gold) - 0.5) / len(record.outcome.documents_kept)
    return min(_BINS - 1, int(share * _BINS))
