"""What the figures of a speed run say: rows, the ratios that matter, and tables for a terminal and a README."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch
from rich.table import Table

from ragkv_evals.speed import Cell


@dataclass(frozen=True)
class Row:
    """One variant at one length. `kept_tokens` is the budget, or the length where nothing is dropped."""

    length: int
    variant: str
    kept_tokens: int
    prefill_tokens_per_s: float
    decode_ms_per_token: float
    kv_bytes_full: int
    kv_bytes_kept: int
    prefill_s: list[float]


@dataclass(frozen=True)
class Ratios:
    """ragkv SnapKV at one length against the others; above 1 is better for ragkv unless stated.

    Attributes:
        prefill_ratio: prefill speed over that of plain transformers.
        snapkv_overhead: share of the prefill that scoring, selection and gathering take (less is better).
        decode_speedup, decode_speedup_vs_full: decoding speed over that of transformers' and ragkv's full cache.
        decode_vs_shortest: time per token over that at the shortest length (1 is ideal, more is worse).
        kv_bytes_ratio: bytes kept over bytes of the full cache.
        prefill_vs_peer, decode_vs_peer: speed over that of each peer.
    """

    length: int
    prefill_ratio: float
    snapkv_overhead: float
    decode_speedup: float
    decode_speedup_vs_full: float
    decode_vs_shortest: float
    kv_bytes_ratio: float
    prefill_vs_peer: dict[str, float]
    decode_vs_peer: dict[str, float]


def rows(cells: Sequence[Cell]) -> list[Row]:
    """One row per cell, in the order of the cells."""
    return [
        Row(
            length=cell.length,
            variant=cell.variant.name,
            kept_tokens=cell.budget if cell.variant.compresses else cell.length,
            prefill_tokens_per_s=cell.length / cell.prefill_s,
            decode_ms_per_token=cell.decode_ms_per_token,
            kv_bytes_full=cell.reads[-1].kv_bytes_full,
            kv_bytes_kept=cell.reads[-1].kv_bytes_kept,
            prefill_s=[read.seconds for read in cell.reads],
        )
        for cell in cells
    ]


def ratios(cells: Sequence[Cell]) -> list[Ratios]:
    """One entry per length of cells that hold "transformers", "ragkv FullKV", "ragkv SnapKV" and any peers."""
    by_length: dict[int, dict[str, Cell]] = {}
    for cell in cells:
        by_length.setdefault(cell.length, {})[cell.variant.name] = cell
    shortest = by_length[min(by_length)]["ragkv SnapKV"]
    return [_ratios(dict(found), shortest) for found in by_length.values()]


def _ratios(found: dict[str, Cell], shortest: Cell) -> Ratios:
    plain, full, snapkv = (found.pop(name) for name in ("transformers", "ragkv FullKV", "ragkv SnapKV"))
    own = snapkv.decode_ms_per_token
    return Ratios(
        length=snapkv.length,
        prefill_ratio=plain.prefill_s / snapkv.prefill_s,
        snapkv_overhead=snapkv.compression_share or 0.0,
        decode_speedup=plain.decode_ms_per_token / own,
        decode_speedup_vs_full=full.decode_ms_per_token / own,
        decode_vs_shortest=own / shortest.decode_ms_per_token,
        kv_bytes_ratio=snapkv.reads[-1].kv_bytes_kept / snapkv.reads[-1].kv_bytes_full,
        prefill_vs_peer={name: peer.prefill_s / snapkv.prefill_s for name, peer in found.items()},
        decode_vs_peer={name: peer.decode_ms_per_token / own for name, peer in found.items()},
    )


def machine(model: torch.nn.Module) -> dict[str, object]:
    """Where a run took place: device, dtype, threads and versions."""
    weight = next(model.parameters())
    on_gpu = weight.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(weight.device) if on_gpu else platform.machine(),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("ragkv", "torch", "transformers")},
    }


def as_json(cells: Sequence[Cell], settings: Mapping[str, object]) -> dict[str, object]:
    """The whole run as one object."""
    return {
        **settings,
        "rows": [asdict(row) for row in rows(cells)],
        "ratios": [asdict(ratio) for ratio in ratios(cells)],
    }


HEADER = ("tokens", "variant", "kept", "prefill tokens/s", "decode ms/token", "KV MiB")


def _texts(row: Row) -> tuple[str, ...]:
    return (
        str(row.length),
        row.variant,
        str(row.kept_tokens),
        f"{row.prefill_tokens_per_s:.0f}",
        f"{row.decode_ms_per_token:.1f}",
        f"{row.kv_bytes_kept / 2**20:.1f}",
    )


def rich_table(cells: Sequence[Cell], title: str) -> Table:
    """For a terminal."""
    table = Table(title=title)
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="left" if index == 1 else "right")
    last = 0
    for row in rows(cells):
        if last not in (0, row.length):
            table.add_section()
        table.add_row(*_texts(row))
        last = row.length
    return table


def markdown_table(cells: Sequence[Cell]) -> str:
    """For a README."""
    lines = [HEADER, ("--:", ":--", *["--:"] * (len(HEADER) - 2)), *map(_texts, rows(cells))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
