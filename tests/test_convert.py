"""A GGUF file becomes a folder with the same weights, the same tokenizer and every end token."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ragkv import convert, storage
from ragkv.errors import ModelError
from tiny_gguf import tiny_qwen2, tokens, write_gguf


@pytest.mark.parametrize("tied", [False, True])
def test_weights_config_and_logits_survive(tmp_path: Path, tied: bool) -> None:
    original = tiny_qwen2(tied)
    convert.convert(write_gguf(tmp_path / "tiny.gguf", original), tmp_path / "out", "me")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    for name, parameter in original.named_parameters():
        assert torch.equal(model.get_parameter(name).float(), parameter), name
    assert model.config.max_position_embeddings == 128
    assert model.config.rope_parameters["rope_theta"] == 50_000.0
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
    ids = torch.arange(40).unsqueeze(0)
    with torch.inference_mode():
        torch.testing.assert_close(model.float()(ids).logits, original(ids).logits)


def test_tokenizer_keeps_template_tool_tokens_and_ends(tmp_path: Path) -> None:
    convert.convert(write_gguf(tmp_path / "tiny.gguf", tiny_qwen2()), tmp_path / "out", "me")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    vocabulary = tokens()
    ends = [vocabulary.index("<|im_end|>"), vocabulary.index("<|endoftext|>")]
    assert model.generation_config.eos_token_id == ends
    assert tokenizer.model_max_length == 128
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the é"}], tokenize=False)
    assert prompt == "<|im_start|>user\nthe é<|im_end|>\n"
    ids = tokenizer(prompt + "<tool_call>").input_ids
    assert ids[0] == vocabulary.index("<|im_start|>")
    assert ids[-1] == vocabulary.index("<tool_call>")
    assert tokenizer.decode(ids) == prompt + "<tool_call>"
    assert tokenizer.decode(ids[-1:], skip_special_tokens=True) == "<tool_call>"


def test_forgotten_weight_is_an_error(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_qwen2(), leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"1 weights are missing, such as .*up_proj"):
        convert.convert(gguf, tmp_path / "out", "me")
    assert not (tmp_path / "out").exists()


def test_other_and_cut_files_are_errors(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 a zip")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        convert.convert(other, tmp_path / "out", "me")
    whole = write_gguf(tmp_path / "tiny.gguf", tiny_qwen2()).read_bytes()
    other.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"cannot convert .*other\.gguf"):
        convert.convert(other, tmp_path / "out", "me")
    with pytest.raises(ModelError, match="cannot read"):
        convert.convert(tmp_path / "absent.gguf", tmp_path / "out", "me")
    assert not (tmp_path / "out").exists()


def test_interrupt_while_saving_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_qwen2())
    save = PreTrainedModel.save_pretrained

    def interrupted(self: PreTrainedModel, folder: Path) -> None:
        save(self, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert.convert(gguf, tmp_path / "out", "me")
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]


def test_space_is_checked_against_the_exact_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen2()
    gguf = write_gguf(tmp_path / "tiny.gguf", model)
    needed = 2 * sum(parameter.numel() for parameter in model.parameters())
    usage = type("Usage", (), {"free": needed - 1})
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ModelError, match=r"converting tiny\.gguf needs 0 MB .* set RAGKV_HOME"):
        convert.convert(gguf, tmp_path / "out", "me")
    usage.free = needed
    convert.convert(gguf, tmp_path / "out", "me")
    assert (tmp_path / "out" / "config.json").is_file()


def test_folder_counts_only_with_its_note(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert not convert.is_converted(folder, "one")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert not convert.is_converted(folder, "one")
    convert.write_note(folder, "one")
    assert convert.is_converted(folder, "one")
    assert not convert.is_converted(folder, "two")
    (folder / convert.NOTE).write_text("[1]")
    assert not convert.is_converted(folder, "one")
