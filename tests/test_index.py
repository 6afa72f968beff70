import json
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ragkv.documents import Document
from ragkv.embedding import SentenceTransformerEmbedder, Vectors
from ragkv.errors import ConfigError, DocumentError, ModelError
from ragkv.index import Index
from ragkv.index_cache import cached_index
from ragkv.progress import Progress
from ragkv.readers import read_paths

SAMPLE = Path(__file__).parents[1] / "evals/ragkv_evals/data/hotpotqa_sample.jsonl"


class HashingEmbedder:
    """Bags of hashed words, cut off as real models do it. Counts the texts it was given."""

    max_tokens = 8

    def __init__(self, name: str = "hashing", dimension: int = 64) -> None:
        self.name = name
        self.dimension = dimension
        self.encoded = 0

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        self.encoded += len(texts)
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split()[: self.max_tokens]:
                row[zlib.crc32(word.strip(".?").encode()) % self.dimension] += 1
        if progress:
            progress("embedding", len(texts), len(texts))
        return vectors


COLOURS = [Document(f"d{n}", text) for n, text in enumerate(["red rose", "blue sky", "red sky", "green sea"])]


@pytest.fixture
def index() -> Index:
    return Index.build(COLOURS, HashingEmbedder())


def words(document: Document) -> int:
    return len(document.text.split())


class TestSearch:
    def test_best_first_with_cosine_scores_and_ranks_from_one(self, index: Index) -> None:
        hits = index.search("red sky", 3)
        assert [hit.document.id for hit in hits] == ["d2", "d0", "d1"]
        assert [hit.score for hit in hits] == pytest.approx([1.0, 0.5, 0.5])
        assert [hit.rank for hit in hits] == [1, 2, 3]

    def test_more_than_there_are_gives_all(self, index: Index) -> None:
        assert len(index.search("red", 99)) == len(index) == 4

    @pytest.mark.parametrize("k", [1, 2, 7, 30, 49])
    def test_ties_are_in_passage_order_also_at_the_cut(self, k: int) -> None:
        texts = ["other thing", "same words", "same query"]  # from worst to best
        grades = np.random.default_rng(0).integers(0, 3, 50)
        index = Index.build([Document(str(n), texts[g]) for n, g in enumerate(grades)], HashingEmbedder())
        found = [int(hit.document.id) for hit in index.search("same query", k)]
        assert found == sorted(range(50), key=lambda n: (-grades[n], n))[:k]

    def test_same_answer_as_a_plain_product_on_random_vectors(self) -> None:
        rng = np.random.default_rng(0)
        vectors = rng.standard_normal((500, 64), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        index = Index([Document(str(n), str(n)) for n in range(500)], vectors, HashingEmbedder())
        query = HashingEmbedder().encode(["some query words"])[0]
        scores = vectors @ query / np.linalg.norm(query)
        hits = index.search("some query words", 20)
        assert [int(hit.document.id) for hit in hits] == list(np.argsort(-scores)[:20])
        assert [hit.score for hit in hits] == pytest.approx(sorted(scores, reverse=True)[:20], abs=1e-6)

    def test_end_of_a_long_query_counts(self, index: Index) -> None:
        query = "the " * 8 + "green sea"
        assert index.search(query, 1)[0].document.id == "d3"

    def test_long_documents_are_found_by_their_end(self) -> None:
        long = Document("long", "nothing " * 20 + "unicorn", "title")
        (hit,) = Index.build([*COLOURS, long], HashingEmbedder()).search("unicorn", 1)
        assert hit.document.metadata["document_id"] == "long"
        assert hit.document.title == "title"
        assert "unicorn" in hit.document.text

    def test_blank_query_and_bad_k_are_refused(self, index: Index) -> None:
        with pytest.raises(ConfigError, match="query is blank"):
            index.search(" \n", 1)
        with pytest.raises(ConfigError, match="k=0 must be at least 1"):
            index.search("red", 0)


class TestBuild:
    def test_passage_length_can_be_shortened_not_lengthened(self) -> None:
        document = Document("d", "one two three four five six")
        assert len(Index.build([document], HashingEmbedder(), max_tokens=2)) == 3
        for max_tokens in (0, 9):
            with pytest.raises(ConfigError, match=rf"max_tokens={max_tokens} is outside 1\.\.8"):
                Index.build([document], HashingEmbedder(), max_tokens=max_tokens)

    def test_no_documents_and_shared_ids_are_refused(self) -> None:
        with pytest.raises(DocumentError, match="no documents to index"):
            Index.build([], HashingEmbedder())
        with pytest.raises(DocumentError, match='the id "d"'):
            Index.build([Document("d", "a"), Document("d", "b")], HashingEmbedder())

    def test_id_that_a_passage_of_another_document_takes_is_refused(self) -> None:
        with pytest.raises(DocumentError, match='the id "d#1"'):
            Index.build([Document("d", "word " * 20), Document("d#1", "b")], HashingEmbedder())

    @pytest.mark.parametrize("vectors", [np.ones((3, 4)), np.ones(4), np.full((4, 4), np.nan)])
    def test_embedder_that_gives_nonsense_is_named(self, vectors: Vectors) -> None:
        embedder = HashingEmbedder()
        embedder.encode = lambda texts, progress: vectors  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="hashing gave shape"):
            Index.build(COLOURS, embedder)

    def test_progress_names_both_steps(self) -> None:
        calls: list[tuple[str, int, int]] = []
        Index.build(COLOURS, HashingEmbedder(), progress=lambda *call: calls.append(call))
        assert calls == [*(("splitting", n, 4) for n in (1, 2, 3, 4)), ("embedding", 4, 4)]


class TestRetrieve:
    def test_fills_the_budget_in_order_of_rank(self, index: Index) -> None:
        assert [document.id for document in index.retrieve("red sky", 6, words)] == ["d2", "d0", "d1"]
        assert [document.id for document in index.retrieve("red sky", 5, words)] == ["d2", "d0"]
        assert len(index.retrieve("red sky", 1000, words)) == 4

    def test_stops_at_the_first_that_does_not_fit(self) -> None:
        documents = [Document("a", "red"), Document("b", "red sea of many words"), Document("c", "blue")]
        index = Index.build(documents, HashingEmbedder())
        assert [hit.document.id for hit in index.search("red", 3)] == ["a", "b", "c"]
        assert [document.id for document in index.retrieve("red", 3, words)] == ["a"]

    def test_counts_what_stands_in_the_prompt(self, index: Index) -> None:
        assert len(index.retrieve("red sky", 8, lambda document: words(document) + 2)) == 2

    def test_budget_below_the_best_passage_is_refused(self, index: Index) -> None:
        with pytest.raises(ConfigError, match="token_budget=1 is less than the 2 tokens of the best passage"):
            index.retrieve("red sky", 1, words)


class TestFiles:
    def test_loaded_index_gives_the_same_hits(self, index: Index, tmp_path: Path) -> None:
        index.save(tmp_path / "new/index")
        embedder = HashingEmbedder()
        loaded = Index.load(tmp_path / "new/index", embedder)
        assert embedder.encoded == 0
        assert loaded.search("red sky", 4) == index.search("red sky", 4)
        assert loaded.passages == index.passages

    def test_rebuild_replaces_the_old_index_and_leaves_no_files_behind(self, index: Index, tmp_path: Path) -> None:
        index.save(tmp_path)
        other = Index.build([Document("x", "other")], HashingEmbedder())
        other.save(tmp_path)
        assert Index.load(tmp_path, HashingEmbedder()).passages == other.passages
        assert len(list(tmp_path.iterdir())) == 3

    @pytest.mark.parametrize("writes_before_the_crash", [0, 1, 2])
    def test_old_index_survives_a_crash_at_any_write(
        self, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes_before_the_crash: int
    ) -> None:
        index.save(tmp_path)
        left = [writes_before_the_crash]

        def replace(old: str, new: Path, replace=os.replace) -> None:
            if left[0] == 0:
                raise OSError(28, "No space left on device")
            left[0] -= 1
            replace(old, new)

        other = Index.build([Document("x", "other")], HashingEmbedder())
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with pytest.raises(DocumentError, match=r"cannot write the index \(No space left on device\)"):
                other.save(tmp_path)
        assert Index.load(tmp_path, HashingEmbedder()).passages == index.passages
        other.save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 3

    def test_folder_with_other_files_is_left_alone(self, index: Index, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_text('{"name": "web app"}')
        with pytest.raises(DocumentError, match=r"holds other files \(manifest\.json\)"):
            index.save(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]

    def test_index_keeps_company_with_a_users_own_files(self, index: Index, tmp_path: Path) -> None:
        index.save(tmp_path)
        (tmp_path / "README.txt").write_text("mine")
        index.save(tmp_path)
        assert (tmp_path / "README.txt").read_text() == "mine"

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(DocumentError, match="no index there: build one"):
            Index.load(tmp_path, HashingEmbedder())

    def test_another_embedder_is_refused(self, index: Index, tmp_path: Path) -> None:
        index.save(tmp_path)
        with pytest.raises(DocumentError, match="was built with hashing, not other: rebuild"):
            Index.load(tmp_path, HashingEmbedder("other"))

    def test_another_dimension_under_the_same_name_is_refused(self, index: Index, tmp_path: Path) -> None:
        index.save(tmp_path)
        with pytest.raises(DocumentError, match="has 64 dimensions, hashing gives 32: rebuild"):
            Index.load(tmp_path, HashingEmbedder(dimension=32)).search("red", 1)

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"format": "other"}, "not an index of ragkv"),
            ({"version": 2}, "has version 2, this ragkv reads 1: rebuild"),
            ({"count": 5}, "is damaged .*: rebuild"),
            ({"dimension": 32}, "is damaged .*: rebuild"),
            ({"sha256": {}}, r"is damaged \(no hash of its passages\): rebuild"),
            ({"sha256": {"passages": "../../etc/passwd"}}, r"is damaged \(no hash of its passages\): rebuild"),
            ({"sha256": {"passages": "0" * 64}}, r"is damaged \(passages: No such file or directory\): rebuild"),
        ],
    )
    def test_manifest_is_checked(self, index: Index, tmp_path: Path, change: dict, told: str) -> None:
        index.save(tmp_path)
        path = tmp_path / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(DocumentError, match=told):
            Index.load(tmp_path, HashingEmbedder())

    @pytest.mark.parametrize("pattern", ["manifest.json", "passages-*", "vectors-*"])
    def test_damage_to_any_file_is_noticed_and_cured_by_saving_again(
        self, index: Index, tmp_path: Path, pattern: str
    ) -> None:
        index.save(tmp_path)
        (path,) = tmp_path.glob(pattern)
        path.write_bytes(path.read_bytes()[:-7])
        with pytest.raises(DocumentError, match=": rebuild it from the documents"):
            Index.load(tmp_path, HashingEmbedder())
        index.save(tmp_path)
        assert Index.load(tmp_path, HashingEmbedder()).passages == index.passages

    @pytest.mark.parametrize("pattern", ["passages-*", "vectors-*"])
    def test_one_changed_bit_is_noticed(self, index: Index, tmp_path: Path, pattern: str) -> None:
        index.save(tmp_path)
        (path,) = tmp_path.glob(pattern)
        data = bytearray(path.read_bytes())
        data[data.index(b"red") if pattern == "passages-*" else -3] ^= 1
        path.write_bytes(data)
        with pytest.raises(DocumentError, match=r"is damaged \(\w+ differ from their hash\): rebuild"):
            Index.load(tmp_path, HashingEmbedder())


class TestCache:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("RAGKV_HOME", str(tmp_path / "home"))
        return tmp_path / "home"

    @pytest.fixture
    def docs(self, tmp_path: Path) -> Path:
        (tmp_path / "docs").mkdir()
        for document in COLOURS:
            (tmp_path / "docs" / f"{document.id}.txt").write_text(document.text)
        return tmp_path / "docs"

    def test_unchanged_files_are_embedded_once(self, docs: Path) -> None:
        built = cached_index([docs], HashingEmbedder())
        embedder = HashingEmbedder()
        again = cached_index([docs], embedder)
        assert embedder.encoded == 0
        assert again.search("red sky", 4) == built.search("red sky", 4)

    def test_changed_files_embedder_or_length_are_embedded_anew(self, docs: Path, home: Path) -> None:
        cached_index([docs], HashingEmbedder())
        cached_index([docs], other := HashingEmbedder("other"))
        cached_index([docs], shorter := HashingEmbedder(), max_tokens=1)
        (docs / "d0.txt").write_text("violet")
        changed = cached_index([docs], embedder := HashingEmbedder())
        assert (other.encoded, shorter.encoded, embedder.encoded) == (4, 8, 4)
        assert changed.passages[0].text == "violet"
        assert len(list((home / "indexes").iterdir())) == 4

    def test_damaged_entry_is_built_again(self, docs: Path, home: Path) -> None:
        cached_index([docs], HashingEmbedder())
        (path,) = home.glob("indexes/*/vectors-*")
        path.write_bytes(b"damaged")
        cached_index([docs], embedder := HashingEmbedder())
        assert embedder.encoded == 4
        cached_index([docs], embedder)
        assert embedder.encoded == 4

    def test_unreadable_files_are_skipped_on_request(self, docs: Path) -> None:
        (docs / "bad.pdf").write_bytes(b"damaged")
        with pytest.raises(DocumentError, match=r"bad\.pdf: damaged PDF"):
            cached_index([docs], HashingEmbedder())
        with pytest.warns(UserWarning, match=r"bad\.pdf"):
            assert len(cached_index([docs], HashingEmbedder(), skip_unreadable=True)) == 4


@pytest.fixture(scope="module")
def embedder() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder(device="cpu")


class TestSentenceTransformer:
    def test_gold_paragraphs_of_real_questions_are_found(self, embedder: SentenceTransformerEmbedder) -> None:
        rows = [json.loads(line) for line in SAMPLE.read_text("utf-8").split("\n")[:8]]
        titles = {paragraph["title"] for row in rows for paragraph in row["paragraphs"]}
        documents = [document for document in read_paths([SAMPLE]) if document.title in titles]
        index = Index.build(documents, embedder)
        recalls = []
        for row in rows:
            gold = {title for title, _ in row["supporting"]}
            recalls.append(len(gold & {hit.document.title for hit in index.search(row["question"], 10)}) / len(gold))
        assert sum(recalls) / len(recalls) > 0.8

    def test_limit_is_what_the_model_reads_whole(self, embedder: SentenceTransformerEmbedder) -> None:
        whole = "word " * embedder.max_tokens
        assert embedder.max_tokens == embedder.count_tokens(whole) == 254
        first, longer, cut = embedder.encode([whole, whole + "elephant", whole + "elephant zebra"])
        assert np.allclose(first, longer, atol=1e-5)
        assert np.allclose(longer, cut, atol=1e-5)
        shorter = embedder.encode(["word " * 253 + "elephant"])[0]
        assert not np.allclose(first, shorter, atol=1e-3)

    def test_vectors_are_unit_float32_and_progress_counts_texts(self, embedder: SentenceTransformerEmbedder) -> None:
        calls: list[tuple[str, int, int]] = []
        vectors = embedder.encode(["a"] * 300, lambda *call: calls.append(call))
        assert (vectors.shape, vectors.dtype) == ((300, 384), np.float32)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert calls == [("embedding", 256, 300), ("embedding", 300, 300)]
        assert embedder.encode([]).shape == (0, 384)

    def test_name_of_a_folder_follows_its_content(self, tmp_path: Path) -> None:
        (tmp_path / "weights").write_text("1")
        before = SentenceTransformerEmbedder(tmp_path).name
        assert before == SentenceTransformerEmbedder(str(tmp_path)).name
        (tmp_path / "weights").write_text("2")
        assert before != SentenceTransformerEmbedder(tmp_path).name
        assert SentenceTransformerEmbedder().name == "all-minilm-l6-v2"

    def test_folder_that_is_no_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="not a sentence-transformers model"):
            SentenceTransformerEmbedder(tmp_path).encode(["a"])

    def test_importing_the_index_does_not_import_the_model_library(self) -> None:
        code = (
            "import sys, ragkv.index_cache; sys.exit('sentence_transformers' in sys.modules or 'torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
