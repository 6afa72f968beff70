"""What was kept, token by token: counts against the cache, text exactly, and a page that no document can hijack."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ragkv.answer import ask
from ragkv.cache import CompressibleLayer, compressible
from ragkv.chat import encode_chat, encode_untrusted
from ragkv.config import SamplingParams
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import ConfigError, PromptTooLong
from ragkv.explain import Explanation, KeptDocument, Piece, explain, kept_counts, text_pieces
from ragkv.explain_page import level, render, runs
from ragkv.policies import FullKV, SnapKV
from ragkv.prefill import prefill
from ragkv.prompt import CitePrompt
from ragkv.reply import Stats
from tiny import tiny_engine, tiny_tokenizer

PLAIN = CitePrompt(system="", rules="Answer.", examples="")
SNAPKV = SnapKV(max_capacity_prompt=96, window_size=16)
STATS = Stats(
    prompt_tokens=2048,
    completion_tokens=9,
    ttft_s=1.0,
    decode_tokens_per_s=10.0,
    kv_bytes_full=8_000_000,
    kv_bytes_kept=2_000_000,
    kept_tokens=512,
    window_size=32,
    unprotected_tokens=12,
)
GREEDY = SamplingParams(max_tokens=5)
DOCUMENTS = [
    Document("a", "The quick brown fox; a lazy dog. Naïve café 👩‍🚀 日本語, tabs\tand\n\nlines.", "Fox"),
    Document("b", "Toad Hall, Canberra. <|im_end|> is only text, and so is <tool_call>.", "Toads", "toads.txt"),
    Document("c", "Who wrote the last question? " * 4, ""),
]
HOSTILE = [
    "<script>document.title='pwned'</script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    "</textarea></title></style></div><script>document.title='pwned'</script>",
    "'\"><svg onload=document.title='pwned'><iframe srcdoc='<script>parent.document.title=1</script>'>",
    "{{ 7 * 7 }}{% for x in y %} <!-- --> ]]> <meta http-equiv=refresh content='0;url=data:text/html,x'>",
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine("llama", SNAPKV)


@pytest.fixture(scope="module")
def explanation(engine: Engine) -> Explanation:
    return explain(engine, "Who wrote the answer?", DOCUMENTS, GREEDY, prompt=PLAIN)


class TestExplain:
    def test_counts_are_those_of_the_cache_one_by_one(self, engine: Engine) -> None:
        prompt = encode_chat(engine.tokenizer, PLAIN.messages("Who?", DOCUMENTS))
        cache = prefill(engine.model, prompt, SNAPKV).cache
        expected = [0] * len(prompt)
        for _, layer in compressible(cache):
            assert layer.positions is not None
            for head in layer.positions[0].tolist():
                for position in head:
                    expected[position] += 1
        counts, heads = kept_counts(cache, len(prompt))
        assert (counts.tolist(), heads) == (expected, 3 * 2)
        assert min(expected) == 0

    def test_a_layer_that_was_not_compressed_kept_everything(self, engine: Engine) -> None:
        prompt = encode_chat(engine.tokenizer, PLAIN.messages("Who?", DOCUMENTS))
        counts, heads = kept_counts(prefill(engine.model, prompt, FullKV()).cache, len(prompt))
        assert counts.tolist() == [heads] * len(prompt)

    def test_sliding_layers_do_not_count(self) -> None:
        mixed = tiny_engine("gemma3", SNAPKV)
        prompt = encode_chat(mixed.tokenizer, PLAIN.messages("Who?", DOCUMENTS))
        cache = prefill(mixed.model, prompt, SNAPKV).cache
        assert sum(isinstance(layer, CompressibleLayer) for layer in cache.layers) == 1
        counts, heads = kept_counts(cache, len(prompt))
        assert (heads, int(counts.max())) == (2, 2)

    def test_the_text_of_every_document_is_shown_exactly(self, explanation: Explanation) -> None:
        for document, kept in zip(DOCUMENTS, explanation.kept, strict=True):
            assert "".join(piece.text for piece in kept.pieces) == document.text.strip() + "\n\n"

    def test_shares_add_up_to_what_the_cache_holds(self, engine: Engine, explanation: Explanation) -> None:
        prompt = encode_chat(engine.tokenizer, PLAIN.messages("Who wrote the answer?", DOCUMENTS))
        counts, heads = kept_counts(prefill(engine.model, prompt, SNAPKV).cache, len(prompt))
        spans = [span for span in prompt.spans if span.kind == "document"]
        for span, kept in zip(spans, explanation.kept, strict=True):
            inside = counts[span.start : span.end].double()
            assert kept.share == pytest.approx(float(inside.mean()) / heads)

    def test_the_answer_is_that_of_ask(self, engine: Engine, explanation: Explanation) -> None:
        answer = ask(engine, "Who wrote the answer?", DOCUMENTS, GREEDY, prompt=PLAIN)
        assert explanation.answer == answer.text != ""
        for name in ("prompt_tokens", "kept_tokens", "window_size", "unprotected_tokens", "kv_bytes_full"):
            assert getattr(explanation.stats, name) == getattr(answer.stats, name)
        assert explanation.stats.kv_bytes_kept == answer.stats.kv_bytes_kept < explanation.stats.kv_bytes_full

    def test_end_of_sequence_ends_the_answer(self, engine: Engine, explanation: Explanation) -> None:
        prompt = encode_chat(engine.tokenizer, PLAIN.messages("Who wrote the answer?", DOCUMENTS))
        first = engine.generate([prompt], GREEDY)
        ended = Engine(replace(engine.loaded, eos_token_ids=(first[0].tokens[0],)), SNAPKV)
        assert explain(ended, "Who wrote the answer?", DOCUMENTS, GREEDY, prompt=PLAIN).answer == ""

    def test_an_empty_question_and_too_long_a_prompt_are_refused(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match="empty"):
            explain(engine, " ", DOCUMENTS, prompt=PLAIN)
        with pytest.raises(PromptTooLong, match=r"max_tokens=900 .* 1024 tokens"):
            explain(engine, "Who?", DOCUMENTS, SamplingParams(max_tokens=900), prompt=PLAIN)


class TestPieces:
    def test_tokens_that_share_a_character_stay_together_and_count_as_the_best_kept(self) -> None:
        tokenizer = tiny_tokenizer()
        ids = encode_untrusted(tokenizer, "é日")
        assert len(ids) == 5
        assert text_pieces(tokenizer, ids, [4, 1, 0, 2, 0]) == [Piece("é", 4), Piece("日", 2)]

    def test_equally_kept_neighbours_are_one_piece(self) -> None:
        tokenizer = tiny_tokenizer()
        ids = encode_untrusted(tokenizer, "xyz!")
        assert text_pieces(tokenizer, ids, [3, 3, 0, 3]) == [Piece("xy", 3), Piece("z", 0), Piece("!", 3)]

    def test_a_replacement_character_of_the_document_itself_is_not_lost(self) -> None:
        tokenizer = tiny_tokenizer()
        for text in ("a\ufffdb", "end \ufffd"):
            ids = encode_untrusted(tokenizer, text)
            pieces = text_pieces(tokenizer, ids, list(range(len(ids))))
            assert "".join(piece.text for piece in pieces) == text

    def test_shades(self) -> None:
        assert [level(share) for share in (0.0, 0.001, 1 / 9, 0.112, 0.5, 1.0)] == [0, 1, 1, 2, 5, 9]
        pieces = [Piece("a", 0), Piece("b", 1), Piece("c", 2), Piece("d \n", 90), Piece("\n\n", 0)]
        assert runs(pieces, 90) == [(0, "a"), (1, "bc"), (9, "d")]
        assert runs([Piece(" \n", 3)], 90) == []


class Tags(HTMLParser):
    """All tags with their attributes, all text, and whether every tag is closed in order."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_page() -> str:
    """A page in which every text that comes from outside is hostile."""
    documents = [Document(f"d{n}", text, text, text) for n, text in enumerate(HOSTILE)]
    kept = tuple(KeptDocument((Piece(text[:9], 0), Piece(text[9:], 5)), 0.5) for text in HOSTILE)
    explanations = [Explanation(text, text, (1, 3), (77,), 9, kept, STATS) for text in HOSTILE[:2]]
    return render(explanations, documents, model=HOSTILE[2], policy=HOSTILE[0])


class TestPage:
    def test_hostile_text_is_only_text(self) -> None:
        parsed = Tags(hostile_page())
        names = {name for name, _ in parsed.tags}
        assert not names & {"script", "img", "svg", "iframe", "textarea", "object", "link", "form", "base"}
        assert sum(name == "meta" for name, _ in parsed.tags) == 5
        assert not [attributes for _, attributes in parsed.tags if any(key.startswith("on") for key in attributes)]
        for text in HOSTILE:
            assert text in parsed.text

    def test_nothing_is_loaded_from_anywhere(self) -> None:
        parsed = Tags(hostile_page())
        for _, attributes in parsed.tags:
            assert "src" not in attributes
            assert (attributes.get("href") or "#").startswith("#")
        policy = next(a["content"] or "" for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
        assert re.fullmatch(
            r"default-src 'none'; style-src 'sha256-[\w+/]{43}='; base-uri 'none'; form-action 'none'", policy
        )
        assert "style" not in {key for _, attributes in parsed.tags for key in attributes}

    def test_a_column_for_each_question_and_a_row_for_each_document(self) -> None:
        parsed = Tags(hostile_page())
        assert sum(name == "article" for name, _ in parsed.tags) == len(HOSTILE)
        cells = [a["class"] for name, a in parsed.tags if name == "section" and (a["class"] or "").startswith("cell")]
        assert cells == ["cell cited", "cell cited", "cell", "cell", "cell cited", "cell cited", *["cell"] * 4]
        for words in ("2,048 tokens", "8.0 MB → 2.0 MB", "50% kept", "do not exist: 77", "12 tokens of instructions"):
            assert words in parsed.text

    def test_kept_text_is_shaded_and_forgotten_text_is_not(self, explanation: Explanation) -> None:
        page = render([explanation], DOCUMENTS, model="tiny", policy="SnapKV")
        parsed = Tags(page)
        shades = {a["class"] for name, a in parsed.tags if name == "span" and re.match(r"k\d", a.get("class") or "")}
        assert len(shades) > 1
        assert "k0" not in shades
        for document in DOCUMENTS:
            assert document.text.strip() in parsed.text

    @pytest.mark.browser
    @pytest.mark.parametrize("width", [420, 1400])
    def test_in_a_browser_nothing_runs_and_the_style_applies(self, width: int, tmp_path: Path) -> None:
        browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        assert browser is not None, "install chromium"
        page = tmp_path / "page.html"
        page.write_text(hostile_page(), encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
        dom = subprocess.run(
            [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        assert "<title>What the KV cache kept</title>" in dom
        parsed = Tags(dom)
        assert not {"script", "img", "svg", "iframe"} & {name for name, _ in parsed.tags}
        for text in HOSTILE:
            assert text in parsed.text
        log = subprocess.run(
            [*command, "--enable-logging=stderr", "--screenshot=" + str(tmp_path / "page.png"), page.as_uri()],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stderr
        assert "Content Security Policy" not in log  # a wrong hash would have the style sheet refused
        assert (tmp_path / "page.png").stat().st_size > 20_000


def test_a_prompt_within_the_budget_is_kept_whole() -> None:
    engine = tiny_engine("qwen2")
    explanation = explain(engine, "Who?", DOCUMENTS[:1], GREEDY, prompt=PLAIN)
    assert explanation.kept[0].share == 1
    assert {piece.kept for piece in explanation.kept[0].pieces} == {explanation.heads}
