"""OpenVINO GenAI as an answering peer. Runs in an environment of its own and imports nothing of ragkv.

Called with a `.gguf` file and a JSON object of options (threads, eos, budget; a budget of null keeps all). Then one
JSON object per line: {"ids", "max_tokens"}; the reply has the tokens and what they cost.
"""

import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found,unused-ignore]
import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]

_SINKS, _RECENT = 32, 128


def _scheduler(budget: int | None) -> Any:
    """Its own eviction: the first tokens, the last ones, and between them those with the most attention."""
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False  # every prompt is read anew
    if budget is not None:
        config.use_cache_eviction = True
        config.cache_eviction_config = genai.CacheEvictionConfig(
            start_size=_SINKS,
            recent_size=_RECENT,
            max_cache_size=budget,
            aggregation_mode=genai.AggregationMode.NORM_SUM,
        )
    return config


class Worker:
    """A pipeline on a GGUF file."""

    def __init__(self, file: str, options: dict[str, Any]) -> None:
        self.pipe = genai.LLMPipeline(
            file,
            "CPU",
            scheduler_config=_scheduler(options["budget"]),
            INFERENCE_NUM_THREADS=options["threads"],
        )
        self.eos = set(options["eos"])

    def generate(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        """Read the prompt and decode greedily."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.stop_token_ids = max_tokens, False, self.eos
        tokens = np.asarray([ids], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(tokens), ov.Tensor(np.ones_like(tokens)))
        done = self.pipe.generate(inputs, config)
        metrics, written = done.perf_metrics, list(done.tokens[0])
        first_s = metrics.get_ttft().mean / 1000
        return {
            "tokens": written,
            "prefill_s": first_s,
            "decode_s": max(0.0, metrics.get_generate_duration().mean / 1000 - first_s),
        }


def main() -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not pass for a reply

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    worker = Worker(sys.argv[1], json.loads(sys.argv[2]))
    reply({name: version(name) for name in ("openvino-genai", "openvino")})
    for line in sys.stdin:
        reply(worker.generate(**json.loads(line)))


if __name__ == "__main__":
    main()
