# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""A weight folder that is not whole is refused in one line; the tiny checkpoint has facebook/sam3's layout."""

import json
import shutil
import socket

import pytest
import torch
from conftest import ROOT, TINY, error_line, run_script
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sam3_utils.checkpoint import check_processor_files, check_weight_files, load_model, load_processor
from sam3_utils.cli import UsageError

MODEL_FILES = ("config.json", "model.safetensors", "processor_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "sam3_model"
    copy.mkdir()
    for name in (*MODEL_FILES, "vocab.json", "merges.txt"):
        shutil.copy(TINY / name, copy)
    return copy


def change_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", MODEL_FILES)
def test_each_missing_file_is_named_with_the_download_command(folder, name):
    (folder / name).unlink()
    if name == "tokenizer.json":  # vocab.json and merges.txt would do
        (folder / "vocab.json").unlink()
    with pytest.raises(UsageError, match=f"{name}.*modelscope download"):
        check_weight_files(folder)
        check_processor_files(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match="no_such: no such folder"):
        check_weight_files(tmp_path / "no_such")


def test_sam3_pt_alone_is_explained(folder):
    (folder / "model.safetensors").rename(folder / "sam3.pt")
    with pytest.raises(UsageError, match="sam3.pt is Meta's own format"):
        check_weight_files(folder)


def test_renamed_weights_are_pointed_out(folder):
    (folder / "model.safetensors").rename(folder / "sam3.safetensors")
    with pytest.raises(UsageError, match="sam3.safetensors is there; rename it"):
        check_weight_files(folder)


@pytest.mark.parametrize("kept", (0, 5, 3000, -1000))
def test_truncated_weights_are_named(folder, kept):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(UsageError, match="truncated or damaged"):
        check_weight_files(folder)


def test_a_git_lfs_pointer_is_recognised(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UsageError, match="git-lfs pointer"):
        check_weight_files(folder)


@pytest.mark.parametrize("text", ("", "{", "[]", '{"model_type": "bert"}'))
def test_a_damaged_or_foreign_config_is_named(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(UsageError, match="config.json"):
        check_weight_files(folder)


def drop(tensors):
    del tensors["detector_model.detr_decoder.query_embed.weight"]


def rename(tensors):
    tensors["detector_model.extra"] = tensors.pop("detector_model.detr_decoder.query_embed.weight")


def reshape(tensors):
    name = "detector_model.text_projection.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


def strip_prefix(tensors):
    for name in [name for name in tensors if name.startswith("detector_model.")]:
        tensors[name.replace("detector_model.", "module.")] = tensors.pop(name)


@pytest.mark.parametrize("change", (drop, rename, reshape, strip_prefix))
def test_weights_that_do_not_fit_tensor_by_tensor_are_refused(folder, change):
    """transformers would fill the gaps with random numbers and only warn."""
    change_tensors(folder, change)
    with pytest.raises(UsageError, match="does not fit SAM3|cannot load it"):
        load_model(folder)


def test_16_bit_weights_are_computed_in_float32():
    with safe_open(TINY / "model.safetensors", framework="pt") as weights:
        stored = {weights.get_tensor(name).dtype for name in weights.keys()}
    assert stored == {torch.float16}
    assert {parameter.dtype for parameter in load_model(TINY).parameters()} == {torch.float32}


@pytest.mark.parametrize("text", ("", '{"model": {}}'))
def test_damaged_tokenizer_files_are_refused(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(UsageError, match="tokenizer"):
        load_processor(folder)


def test_a_vocabulary_that_swallows_words_is_refused(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = {"<|startoftext|>": 512, "<|endoftext|>": 513}
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="turns 'dog' into"):
        load_processor(folder)


def test_scripts_refuse_a_half_folder_before_anything_is_written(folder, tmp_path):
    (folder / "model.safetensors").write_bytes(b"half")
    result = run_script(
        "sam3_export_onnx.py", "--target_device", "300I", "--model_path", folder, "--output_dir", tmp_path / "out"
    )
    assert "truncated or damaged" in error_line(result)
    assert not (tmp_path / "out").exists()


def test_loading_contacts_no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a network connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)  # offline, a name look-up fails before any connection
    load_processor(TINY)
    load_model(TINY)


def test_the_tiny_checkpoint_is_laid_out_like_facebook_sam3():
    assert json.loads((TINY / "config.json").read_text())["model_type"] == "sam3_video"
    with safe_open(TINY / "model.safetensors", framework="pt") as weights:
        prefixes = {name.split(".")[0] for name in weights.keys()}
    assert prefixes == {"detector_model", "tracker_model", "tracker_neck"}
    assert sum((TINY / name).stat().st_size for name in (*MODEL_FILES, "vocab.json", "merges.txt")) <= 12e6


def test_the_tracker_part_loads_with_no_missing_key():
    from transformers import Sam3TrackerModel

    _, info = Sam3TrackerModel.from_pretrained(TINY, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]


def test_the_recipe_rebuilds_the_committed_tokenizer():
    from recipe import build_tokenizer

    assert build_tokenizer().get_vocab() == load_processor(TINY).tokenizer.get_vocab()
    assert (ROOT / "assets" / "tiny_sam3" / "merges.txt").read_text().startswith("#version")
