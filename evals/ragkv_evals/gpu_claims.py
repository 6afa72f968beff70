"""The paper's two claims, recomputed from the rows of a GPU check: faster decoding, and longer prompts that fit.

SnapKV, arXiv 2404.14469, states 3.6 times faster decoding at 16K tokens (batch 2) and 8.2 times more memory-efficient.
"""

from collections.abc import Sequence

from ragkv_evals.gpu_measure import Row

PAPER = {"decode_speedup": 3.6, "longest_prompt_ratio": 8.2}
A100_BYTES = 80 * 2**30  # the paper's device


def claims(rows: Sequence[Row], length: int, batch: int, memory: int | None) -> dict[str, object]:
    """Measured counterparts of the paper's figures.

    Args:
        rows: of one model.
        length, batch: where decoding is compared.
        memory: bytes of the device, None if unknown.
    """
    sizes = {"device": memory, "80 GiB": A100_BYTES}
    return {
        "paper": PAPER,
        "decode_speedup": _speedups(rows, length, batch),
        "longest_prompt_measured": {
            system: max((r.length for r in _of(rows, system) if r.outcome == "ok"), default=0)
            for system in ("transformers", "ragkv SnapKV")
        },
        "longest_prompt_extrapolated": {name: _longest(rows, size) for name, size in sizes.items() if size is not None},
    }


def _of(rows: Sequence[Row], system: str) -> list[Row]:
    """The rows of a system at batch 1; of SnapKV only those of the largest budget."""
    found = [row for row in rows if row.system == system and row.batch == 1]
    largest = max((row.budget or 0 for row in found), default=0)
    return [row for row in found if (row.budget or 0) in (0, largest)]


def _speedups(rows: Sequence[Row], length: int, batch: int) -> dict[str, float]:
    """Speed of each budget over that of transformers' full cache."""
    here = [row for row in rows if (row.length, row.batch) == (length, batch) and row.decode_ms_per_token]
    plain = [row.decode_ms_per_token for row in here if row.system == "transformers"]
    if not plain or plain[0] is None:
        return {}
    return {
        f"{row.system} {row.budget or ''}".strip(): plain[0] / row.decode_ms_per_token
        for row in here
        if row.system != "transformers" and row.decode_ms_per_token
    }


def _longest(rows: Sequence[Row], memory: int) -> dict[str, float]:
    """Prompt length at which a straight line through the two longest measured peaks reaches `memory`."""
    lengths: dict[str, float] = {}
    for system in ("transformers", "ragkv SnapKV"):
        peaks = sorted((row.length, row.peak_bytes) for row in _of(rows, system) if row.peak_bytes is not None)
        if len(peaks) >= 2:
            (short, low), (long, high) = peaks[-2:]
            if high > low:
                lengths[system] = round(long + (memory - high) * (long - short) / (high - low))
    if len(lengths) == 2:
        lengths["ratio"] = lengths["ragkv SnapKV"] / lengths["transformers"]
    return lengths
