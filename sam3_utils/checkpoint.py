# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""A SAM3 weight folder: is it whole, and its model, tokenizer and picture processor, loaded without any network."""

import json
import os
import re
import sys
from pathlib import Path

from sam3_utils.cli import UsageError
from sam3_utils.contract import ModelShapes

DOWNLOAD_HINT = "modelscope download --model facebook/sam3 --local_dir ./sam3_model"
WEIGHTS = "model.safetensors"


def _transformers():
    """transformers, told to stay offline and, when nobody watches, to draw no loading bars."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    if transformers.__version__ != "5.0.0":
        raise UsageError(
            f"transformers {transformers.__version__} is installed, the kit is proven with 5.0.0: "
            "pip install -r requirements.txt"
        )
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    return transformers


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise UsageError(f"{path}: missing; complete the folder: {DOWNLOAD_HINT}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not valid JSON ({error}); download the file again: {DOWNLOAD_HINT}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a JSON object; download the file again: {DOWNLOAD_HINT}")
    return value


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; it should hold SAM3's files: {DOWNLOAD_HINT}")


def check_processor_files(folder: Path) -> None:
    """Check that the tokenizer's and the picture processor's files are there and readable.

    Raises:
        UsageError: the folder or a file is missing or broken.
    """
    _require_folder(folder)
    _read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        _read_json(folder / "tokenizer.json")
    elif not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
        raise UsageError(f"{folder / 'tokenizer.json'}: missing; complete the folder: {DOWNLOAD_HINT}")
    settings = folder / "preprocessor_config.json"
    _read_json(settings if settings.is_file() else folder / "processor_config.json")


def processor_files(folder: Path) -> list[Path]:
    """The files that decide how pictures and phrases become tensors, for hashing."""
    names = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "merges.txt")
    return [folder / name for name in (*names, "preprocessor_config.json", "processor_config.json")
            if (folder / name).is_file()]  # fmt: skip


def check_weight_files(folder: Path) -> None:
    """Check that config.json and model.safetensors are there, belong to SAM3 and are not cut short.

    Raises:
        UsageError: a file is missing, of another format, or truncated.
    """
    _require_folder(folder)
    config = _read_json(folder / "config.json")
    if config.get("model_type") not in ("sam3_video", "sam3"):
        raise UsageError(
            f"{folder / 'config.json'}: model_type is {config.get('model_type')!r}, not sam3_video or sam3; "
            f"this is not a SAM3 folder: {DOWNLOAD_HINT}"
        )
    weights = folder / WEIGHTS
    if not weights.is_file():
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        if others:
            raise UsageError(f"{weights}: missing, but {', '.join(others)} is there; rename it to {WEIGHTS}")
        if (folder / "sam3.pt").is_file():
            raise UsageError(
                f"{weights}: missing. The folder's sam3.pt is Meta's own format, which this kit does not read; "
                f"fetch the file beside it: {DOWNLOAD_HINT}"
            )
        raise UsageError(f"{weights}: missing; complete the folder: {DOWNLOAD_HINT}")
    with open(weights, "rb") as stream:
        if stream.read(40).startswith(b"version https://git-lfs"):
            raise UsageError(f"{weights}: a git-lfs pointer, not the weights; fetch them: {DOWNLOAD_HINT}")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy"):
            pass
    except SafetensorError as error:
        raise UsageError(f"{weights}: truncated or damaged ({error}); download it again: {DOWNLOAD_HINT}") from None


def _named(keys) -> str:
    keys = sorted(keys)
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def size_unit(config: dict) -> int:
    """The pixels of which a picture's side must be a multiple: patch x window, 336 for facebook/sam3.

    Args:
        config: of a checkpoint folder, as config.json has it.

    Raises:
        KeyError, TypeError: the numbers are not there.
    """
    backbone = config.get("detector_config", config)["vision_config"]["backbone_config"]
    return backbone["patch_size"] * backbone["window_size"]


def _at_size(config, image_size: int, folder: Path):
    """A `Sam3Config` for pictures of another side: RoPE, position table, windows and masks follow from it.

    Raises:
        UsageError: `image_size` is not a multiple of `size_unit`.
    """
    unit = size_unit(config.to_dict())
    if image_size % unit or image_size <= 0:
        near = sorted({max(unit, image_size // unit * unit), max(unit, -(-image_size // unit) * unit)})
        raise UsageError(
            f"--image_size {image_size}: {folder} takes multiples of {unit} (patch x window), such as "
            f"{' or '.join(map(str, near))}"
        )
    vision, native = config.vision_config, config.vision_config.image_size
    # What nobody derives from the picture's side: only the sizes of the outputs are read from here.
    vision.backbone_feature_sizes = [
        [side * image_size // native for side in sides] for sides in vision.backbone_feature_sizes
    ]
    config.image_size = image_size
    return config


def load_model(folder: Path, dtype: str = "float32", image_size: int | None = None):
    """The text branch of a checkpoint folder, a `Sam3Model` in eval mode on the CPU.

    Args:
        dtype: torch dtype name; never taken from the file, whose weights may be 16-bit.
        image_size: side of the pictures in pixels; None: the checkpoint's own.

    Raises:
        UsageError: the folder is not whole, its weights do not fit the model tensor by tensor, or it cannot take
            pictures of that size.
    """
    check_weight_files(folder)
    transformers = _transformers()
    import torch

    try:
        config = transformers.Sam3Config.from_pretrained(folder, local_files_only=True)
        if image_size is not None:
            config = _at_size(config, image_size, folder)
        model, info = transformers.Sam3Model.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
        )
    except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise UsageError(f"{folder}: transformers cannot load it: {' '.join(lines)[:300]}; {DOWNLOAD_HINT}") from None
    # transformers fills a missing tensor with random numbers and only warns: a model that is silently wrong.
    faults = [
        f"{len(info[kind])} {kind.replace('_', ' ')} ({_named(map(str, info[kind]))})"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[kind]
    ]
    if faults:
        raise UsageError(f"{folder / WEIGHTS}: does not fit SAM3: {'; '.join(faults)}; fetch it again: {DOWNLOAD_HINT}")
    return model.eval()


def has_clicks(folder: Path) -> bool:
    """Does the weight folder, which `check_weight_files` has let pass, hold SAM3's click branch too?"""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="numpy") as file:
        return any(key.startswith("tracker_neck.") for key in file.keys())


def load_tracker(folder: Path, sam3):
    """The click branch of a checkpoint folder, a `Sam3TrackerModel` in eval mode that shares the ViT of `sam3`, a
    `Sam3Model` of the same folder, and takes on its dtype, device and picture size.

    Raises:
        UsageError: the folder holds no click branch, or its weights do not fit the model tensor by tensor.
    """
    if not has_clicks(folder):
        raise UsageError(f"{folder / WEIGHTS}: no tracker_neck. in it: this checkpoint knows words, not clicks")
    transformers = _transformers()
    import torch
    from safetensors import safe_open

    try:
        config = transformers.Sam3TrackerConfig.from_pretrained(folder, local_files_only=True)
        config = transformers.Sam3TrackerConfig(**config.tracker_config)
        vision, size = config.vision_config, sam3.config.vision_config.image_size
        vision.image_size = config.prompt_encoder_config.image_size = size
        vision.backbone_feature_sizes = sam3.config.vision_config.backbone_feature_sizes
        with torch.device("meta"):
            tracker = transformers.Sam3TrackerModel(config).eval()
        tensors, wanted = {}, tracker.state_dict()
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            for key in file.keys():
                name = re.sub("^tracker_neck", "vision_encoder.neck", key.removeprefix("tracker_model."))
                if name in wanted and key.startswith("tracker_"):
                    tensors[name] = file.get_tensor(key).to(sam3.device, sam3.dtype)
        missing, _ = tracker.load_state_dict(tensors, strict=False, assign=True)
    except (RuntimeError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{folder}: its click branch cannot be loaded: {str(error)[:300]}; {DOWNLOAD_HINT}") from None
    missing = [name for name in missing if not name.startswith("vision_encoder.backbone.")]
    if missing:
        raise UsageError(f"{folder / WEIGHTS}: does not fit SAM3: {_named(missing)} missing; {DOWNLOAD_HINT}")
    tracker.vision_encoder.backbone = sam3.vision_encoder.backbone
    return tracker.requires_grad_(False)


def empty_model(folder: Path):
    """The text branch of a checkpoint folder on the meta device: its structure, without a weight in memory.

    Raises:
        UsageError: the folder is not whole, or config.json is no SAM3 configuration.
    """
    check_weight_files(folder)
    transformers = _transformers()
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return transformers.Sam3Model(config).eval()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{folder / 'config.json'}: transformers cannot build it: {str(error)[:300]}") from None


def model_shapes(config) -> ModelShapes:
    """The contract's numbers from a `Sam3Config`; the batch is free."""
    sizes = tensor_sizes(config)
    return ModelShapes(sizes["S"], sizes["Q"], sizes["M"], None)


def tensor_sizes(config) -> dict[str, int]:
    """The contract's letters, but for the free batches, from a `Sam3Config`."""
    levels = (sizes[0] for sizes in config.vision_config.backbone_feature_sizes)
    return dict(zip("ABG", levels)) | {
        "S": config.vision_config.image_size,
        "Q": config.detr_decoder_config.num_queries,
        "M": config.vision_config.backbone_feature_sizes[0][0],
        "C": config.vision_config.fpn_hidden_size,
        "D": config.vision_config.backbone_config.hidden_size,
    }


def load_processor(folder: Path):
    """The folder's `Sam3Processor`: tokenizer and picture processor.

    Raises:
        UsageError: files are missing or unreadable, or the tokenizer is not of CLIP's kind.
    """
    check_processor_files(folder)
    transformers = _transformers()
    try:
        processor = transformers.Sam3Processor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds, bare Exception among them
        raise UsageError(f"{folder}: its tokenizer or processor files cannot be read: {str(error)[:300]}") from None
    ids = processor.tokenizer("dog")["input_ids"]
    start, end = processor.tokenizer.bos_token_id, processor.tokenizer.eos_token_id
    # A broken vocabulary makes every phrase the same (unknown is the end token), and every result quietly empty.
    if ids[0] != start or ids[-1] != end or not ids[1:-1] or {start, end} & set(ids[1:-1]):
        raise UsageError(f"{folder}: its tokenizer turns 'dog' into {ids}, its files are damaged: {DOWNLOAD_HINT}")
    return processor
