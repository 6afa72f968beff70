"""kvpress SnapKV as an answering peer. Runs in an environment of its own and imports nothing of ragkv.

Called with a model folder and a JSON object of options (dtype, device, threads, window_size, kernel_size, eos). Then
one JSON object per line: {"ids", "budget", "max_tokens"}; the reply has the tokens and what they cost.
"""

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from kvpress import SnapKVPress  # type: ignore[import-not-found,unused-ignore]
from transformers import AutoModelForCausalLM, DynamicCache


def _load(folder: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


class Worker:
    """A model that reads a prompt under a press and decodes greedily."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        dtype, self.device = getattr(torch, options["dtype"]), torch.device(options["device"])
        self.model = _load(folder, dtype).to(self.device).eval()
        self.press = {name: options[name] for name in ("window_size", "kernel_size")}
        self.eos = set(options["eos"])

    def generate(self, ids: list[int], budget: int, max_tokens: int) -> dict[str, Any]:
        """Keep `budget` entries per KV head of the prompt, the window included, and go on from there."""
        # kvpress takes a ratio and rounds the kept length down; half a token of margin makes that the budget.
        press = SnapKVPress(compression_ratio=max(0.0, 1 - (budget + 0.5) / len(ids)), **self.press)
        cache: Any = DynamicCache(config=self.model.config)
        started = time.perf_counter()
        with press(self.model):
            token = self._step(ids, 0, cache)
        read = time.perf_counter()
        kept = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)
        entries = cache.layers[0].keys.shape[-2]
        tokens = [token]
        while tokens[-1] not in self.eos and len(tokens) < max_tokens:
            tokens.append(self._step([tokens[-1]], len(ids) + len(tokens) - 1, cache))
        return {
            "tokens": tokens,
            "prefill_s": read - started,
            "decode_s": time.perf_counter() - read,
            "kept_tokens": entries,
            "kv_bytes_kept": kept,
            "kv_bytes_full": kept // entries * len(ids),
        }

    def _step(self, ids: list[int], position: int, cache: Any) -> int:
        positions = torch.arange(position, position + len(ids), device=self.device)
        output = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=positions.unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return int(output.logits[0, -1].argmax())


@torch.inference_mode()
def main() -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not pass for a reply

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    worker = Worker(sys.argv[1], json.loads(sys.argv[2]))
    reply({name: version(name) for name in ("kvpress", "transformers", "torch")})
    for line in sys.stdin:
        reply(worker.generate(**json.loads(line)))


if __name__ == "__main__":
    main()
