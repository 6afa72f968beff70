"""kvpress SnapKV as a measured peer. Runs in an environment of its own and imports nothing of ragkv.

Called with a model folder and a JSON object of options (dtype, device, threads, window_size, kernel_size). Then one
JSON object per line: {"op": "prefill", "ids", "budget"} or {"op": "step", "length", "token"}; see `Worker`.
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
    """Holds the model and one compressed prompt per length."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        dtype, self.device = getattr(torch, options["dtype"]), torch.device(options["device"])
        self.model = _load(folder, dtype).to(self.device).eval()
        self.press = {name: options[name] for name in ("window_size", "kernel_size")}
        self.caches: dict[int, tuple[Any, int]] = {}

    def prefill(self, ids: list[int], budget: int) -> dict[str, float]:
        """Read a prompt and keep `budget` entries per KV head, the window included."""
        # kvpress takes a ratio and rounds the kept length down; half a token of margin makes that the budget.
        press = SnapKVPress(compression_ratio=max(0.0, 1 - (budget + 0.5) / len(ids)), **self.press)
        cache: Any = DynamicCache(config=self.model.config)
        tokens = torch.tensor([ids], device=self.device)
        started = self._now()
        with press(self.model):
            self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds = self._now() - started
        self.caches[len(ids)] = (cache, len(ids))
        kept = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)
        per_token = kept // cache.layers[0].keys.shape[-2]
        return {"seconds": seconds, "kv_bytes_kept": kept, "kv_bytes_full": per_token * len(ids)}

    def step(self, length: int, token: int) -> dict[str, float]:
        """Decode one given token on the prompt of this length."""
        cache, position = self.caches[length]
        self.caches[length] = (cache, position + 1)
        started = self._now()
        self.model(
            input_ids=torch.tensor([[token]], device=self.device),
            position_ids=torch.tensor([[position]], device=self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return {"seconds": self._now() - started}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@torch.inference_mode()
def main() -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not pass for a reply

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    worker = Worker(sys.argv[1], json.loads(sys.argv[2]))
    reply({name: version(name) for name in ("kvpress", "transformers", "torch")})
    for line in sys.stdin:
        request = json.loads(line)
        reply(getattr(worker, request.pop("op"))(**request))


if __name__ == "__main__":
    main()
