"""A tiny model as a folder, for commands that load one, and records of runs that never took place."""

from collections.abc import Callable

import pytest

from ragkv_evals.metrics import cited
from ragkv_evals.records import Outcome, Record
from tiny import plain_model, tiny_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model that reads 8K tokens."""
    folder = tmp_path_factory.mktemp("model")
    tiny = plain_model("llama")
    tiny.config.max_position_embeddings = 8192
    tiny.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def record_of() -> Callable[..., Record]:
    """Makes a record that has these figures, says what a test wants, and is ordinary in all else."""

    def make(
        policy: str,
        example: str = "q",
        *,
        context_tokens: int | None = 1000,
        depth: float | None = None,
        reply: str = "reply [1]",
        survival: float = 0.5,
        gold: tuple[int, ...] = (1,),
        documents: int = 4,
        **figures: float,
    ) -> Record:
        entries = policy.partition(":")[2].split(",")[0]
        length = context_tokens or 500
        kept = float(entries) if entries else float(length)
        outcome = Outcome(
            policy=policy,
            reply=reply,
            finish_reason="stop",
            prompt_tokens=length,
            completion_tokens=3,
            budget=kept,
            kept_tokens=kept,
            gold_survival=survival,
            answer_survival=None,
            documents_kept=(survival,) * documents,
            gold_kept=(((0, "lost "), (9, "kept")),),
            unprotected_tokens=0,
            ttft_s=1.0,
            decode_tokens_per_s=10.0,
            kv_bytes_full=8 * length,
            kv_bytes_kept=int(8 * kept),
            peak_memory_bytes=None,
        )
        return Record(
            example,
            context_tokens,
            depth,
            "",
            f"Question {example}?",
            (("a",),),
            gold,
            tuple(cited(reply, [""] * documents)),
            figures,
            None,
            outcome,
        )

    return make
