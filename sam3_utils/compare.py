# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Two models on the same inputs: choose the inputs, run both in step, read what was written beside them."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from sam3_utils import contract
from sam3_utils.backends import is_split, split_parts
from sam3_utils.cli import CheckFailed, UsageError
from sam3_utils.datasets import Sample, read_coco
from sam3_utils.differences import (
    compare_detections,
    difference_figures,
    difference_row,
    iou,
    output_differences,
)
from sam3_utils.images import PictureError, load_rgb, prepare
from sam3_utils.pipeline import run_batches
from sam3_utils.prompts import encode_phrases

logger = logging.getLogger(__name__)

# Phrases of different lengths, so that every row of a batch has another attention mask.
PHRASES = ("star", "small red circle", "two dogs on the grass")
DEMO_ROOT = Path("demo_output/coco2017")  # where README's commands draw it
DEMO_MAKER = Path(__file__).resolve().parent.parent / "assets" / "tiny_sam3" / "make_demo_data.py"
DEMO_PICTURES = 8  # 48 pairs, of which the tiny checkpoint detects something in 25


def random_feeds(processor, image_size: int, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs by the contract: blocky random pictures in -1..1 (as textured as photographs) and `PHRASES`."""
    rng = np.random.default_rng(seed)
    cells = rng.uniform(-1, 1, (batch, 3, 12, 12)).astype(np.float32)
    index = np.arange(image_size) * 12 // image_size
    pixel_values = np.clip(
        cells[:, :, index][..., index] + rng.normal(0, 0.1, (batch, 3, image_size, image_size)), -1, 1
    ).astype(np.float32)
    input_ids, attention_mask, _ = encode_phrases(processor, [PHRASES[row % len(PHRASES)] for row in range(batch)])
    return {"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask}


def random_boxes(count: int, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """`contract.BOXES`: lists of `count` boxes of either label, of none, and of one, in turn."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(0, 1, (batch, count, 2))
    centre = size / 2 + rng.uniform(0, 1, (batch, count, 2)) * (1 - size)
    lengths = np.resize([count, 0, 1], (batch, 1))
    return {
        "input_boxes": np.concatenate([centre, size], axis=-1).astype(np.float32),
        "input_boxes_labels": np.where(np.arange(count) < lengths, rng.integers(0, 2, (batch, count)), contract.NO_BOX),
    }


def random_clicks(count: int, image_size: int, batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`input_points` and `input_labels` of prompts with up to `count` points: clicks alone, a box, or both, in turn."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(0, image_size, (batch, count, 2)).astype(np.float32)
    labels = rng.integers(0, 2, (batch, count))
    for row in range(batch):
        used = rng.integers(1, count + 1)
        if row % 3 and count > 1:  # the two corners first, then clicks, or none
            points[row, :2].sort(axis=0)
            labels[row, :2] = contract.TOP_LEFT, contract.BOTTOM_RIGHT
            used = 2 if row % 3 == 1 else max(2, used)
        labels[row, used:] = contract.NO_POINT
    return points, labels


def _click_differences(reference, candidate, feeds: dict, batch: int) -> dict[str, dict]:
    """The worst of `output_differences` over prompts with and without earlier masks, of three masks and of one."""
    features = [model.encode_clicks(model.encode_picture(feeds["pixel_values"][0])) for model in (reference, candidate)]
    points, labels = random_clicks(candidate.clicks, reference.shapes.image_size, batch, seed=batch)
    earlier, worst = None, {}
    for multimask in (True, False):
        answers = [
            model.click(found, points, labels, earlier, multimask)
            for model, found in zip((reference, candidate), features)
        ]
        for name, row in output_differences(*answers).items():
            worst[f"click {name}"] = max(worst.get(f"click {name}", row), row, key=lambda row: row["max_abs"])
        earlier = np.ascontiguousarray(answers[0]["pred_masks"][:, :1])
    return worst


def verify_onnx(
    checkpoint_path: Path, onnx_path: Path, batches: tuple[int, ...], image_size: int | None
) -> dict[int, dict]:
    """`output_differences` of an exported graph against the untouched PyTorch model, for each batch size.

    The reference uses transformers' own modules and default attention, so that rewrites, tracing and graph passes
    are all under test. Called in a process of its own: both models are in memory.
    """
    from sam3_utils.backends import open_model
    from sam3_utils.checkpoint import load_processor

    processor = load_processor(checkpoint_path)
    reference, candidate = open_model(checkpoint_path, image_size=image_size), open_model(onnx_path)
    differences = {}
    for batch in batches:
        feeds = random_feeds(processor, reference.shapes.image_size, batch, seed=batch)
        if candidate.exemplars:
            feeds |= random_boxes(candidate.exemplars, batch, seed=batch)
        differences[batch] = output_differences(reference.infer(feeds), candidate.infer(feeds))
        if candidate.clicks:
            differences[batch] |= _click_differences(reference, candidate, feeds, batch)
    return differences


def given_samples(images: list[Path], phrases: list[str]) -> list[Sample]:
    """Every phrase on every picture, no masks known.

    Raises:
        UsageError: a picture cannot be used.
    """
    samples, faults = [], []
    for image_id, path in enumerate(dict.fromkeys(images)):
        if path.is_dir():
            raise UsageError(f"--images {path}: a folder; give its pictures, such as {path}/*.jpg")
        try:
            image = load_rgb(path)
        except PictureError as error:
            faults.append(str(error))
            continue
        size = image.height, image.width
        samples += [Sample(image_id, index, text, path, size, ()) for index, text in enumerate(dict.fromkeys(phrases))]
    if faults:
        raise UsageError(f"--images: {'; '.join(faults)}; leave these out")
    return samples


def demo_samples(root: Path = DEMO_ROOT) -> list[Sample]:
    """The first `DEMO_PICTURES` pictures of the demo set with their present and absent phrases; drawn if not there.

    Raises:
        UsageError: it cannot be drawn, or what is there holds no sample.
    """
    if not (root / "annotations" / "instances_val2017.json").is_file():  # the file that is written last
        logger.info("drawing the demo pictures into %s", root)
        drawn = subprocess.run([sys.executable, DEMO_MAKER, "--output_dir", root], capture_output=True, text=True)
        if drawn.returncode:
            reason = (drawn.stderr.strip().splitlines() or [f"exit code {drawn.returncode}"])[-1]
            raise UsageError(f"{root}: the demo pictures cannot be drawn ({reason}); give --images and --phrases")
    dataset = read_coco(root, "exclude")
    pictures = list(dict.fromkeys(sample.image_id for sample in dataset.samples))[:DEMO_PICTURES]
    if not pictures:
        raise UsageError(f"{root}: holds no sample; remove the folder, or give --images and --phrases")
    chosen = (sample for sample in [*dataset.samples, *dataset.absent] if sample.image_id in pictures)
    return sorted(chosen, key=lambda sample: pictures.index(sample.image_id))


def check_same_shapes(models: dict, paths: dict) -> None:
    """Check that both models take the same pictures and give as many queries and mask cells.

    Args:
        models, paths: by side.

    Raises:
        UsageError: they do not.
    """
    sides = {
        side: (model.shapes.image_size, model.shapes.num_queries, model.shapes.mask_size)
        for side, model in models.items()
    }
    if len(set(sides.values())) > 1:
        texts = (f"{paths[side]} has {sizes}" for side, sizes in sides.items())
        raise UsageError(f"not the same model (picture side, queries, mask side): {', '.join(texts)}")


def common_taps(models: dict, paths: dict) -> tuple[str, ...]:
    """The FPN levels that both models offer; what one of them lacks is said.

    Args:
        models, paths: by side.

    Raises:
        UsageError: there is none.
    """
    taps = tuple(name for name in contract.TAPS if all(name in model.taps for model in models.values()))
    lacking = "; ".join(
        f"{paths[side]} has no {', '.join(name for name in contract.TAPS if name not in model.taps)}"
        for side, model in models.items()
        if set(model.taps) != set(contract.TAPS)
    )
    if not taps:
        raise UsageError(f"--taps: {lacking}; export it with sam3_export_onnx.py --taps, or leave --taps out")
    if lacking:
        logger.warning("--taps: only %s compared: %s", ", ".join(taps), lacking)
    return taps


def named(model, name: str, taps: tuple[str, ...]) -> SimpleNamespace:
    """`model` as `run_batches` takes it: always asked for `taps`, and called by its name when it fails."""

    def infer(feeds):
        try:
            return model.infer(feeds, taps)
        except CheckFailed as error:
            raise type(error)(f"{name}: {error}") from None

    return SimpleNamespace(shapes=model.shapes, infer=infer)


def encode_prompts(processor, samples: list[Sample]) -> dict[str, list[np.ndarray]]:
    """phrase -> its rows of input_ids and attention_mask, as `run_batches` takes them.

    Raises:
        UsageError: a phrase is empty or too long.
    """
    phrases = list(dict.fromkeys(sample.prompt for sample in samples))
    input_ids, attention_mask, _ = encode_phrases(processor, phrases)
    return {phrase: pair for phrase, *pair in zip(phrases, input_ids, attention_mask)}


def paired_outputs(
    models: tuple, batch_sizes: tuple[int, int], processor, samples: list[Sample], tokens: dict
) -> Iterator[tuple[Sample, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Both models' outputs of each sample, without the batch dimension.

    Each model runs batches of its own size, and no more than one batch of outputs of each is kept: facebook/sam3 gives
    66 MB of masks a sample.

    Args:
        models: reference and candidate, from `named`.

    Raises:
        NotFinite: an output is not finite.
    """

    def rows(model, size):
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        for _, outputs, errors in run_batches(model, processor, batches, tokens):
            for row, error in enumerate(errors):
                if error:
                    raise UsageError(error)
                yield {name: array[row] for name, array in outputs.items()}

    yield from zip(samples, *map(rows, models, batch_sizes))


def slot_difference(model, batch_size: int, processor, samples: list[Sample], tokens: dict) -> dict:
    """Does a sample's answer depend on its place in the batch, or on its neighbours?

    One sample in every place, then a different one in each, then in each place the next of them: an answer that comes
    from another place's input is not the same in all three.

    Returns:
        relative (as in `difference_figures`), and the output and the place where it is worst.

    Raises:
        NotFinite: an output is not finite.
    """
    rows = []
    for slot in range(batch_size):
        sample = samples[slot % len(samples)]
        picture = prepare(processor, load_rgb(sample.path, sample.size))
        # Few pictures still fill a batch: rolled to the side, each is another one.
        picture = np.roll(picture, slot * picture.shape[-1] // batch_size, axis=-1)
        rows.append(dict(zip(contract.INPUTS, (picture, *tokens[sample.prompt]))))
    order = np.arange(batch_size)

    def infer(numbers):
        return model.infer({name: np.stack([rows[number][name] for number in numbers]) for name in contract.INPUTS})

    def worst(pairs):
        return max(
            (
                {"relative": difference_figures([difference_row(first, second)])["relative"],
                 "output": name, "slot": slot, "batch": batch_size}
                for name, first, second, slot in pairs
            ),
            key=lambda found: found["relative"],
        )  # fmt: skip

    same = infer(order * 0)
    alike = worst((name, array[0], array[slot], slot) for name, array in same.items() for slot in range(1, batch_size))
    mixed, moved = infer(order), infer((order + 1) % batch_size)
    return max(
        alike,
        worst((name, array[0], mixed[name][0], 0) for name, array in same.items()),
        worst((name, array[slot], moved[name][slot - 1], slot)
              for name, array in mixed.items() for slot in range(batch_size)),
        key=lambda found: found["relative"],
    )  # fmt: skip


def compare_models(
    models: tuple, batch_sizes: tuple[int, int], processor, samples: list[Sample], tokens: dict, score_threshold: float
) -> dict:
    """Run reference and candidate (from `named`) over `samples`.

    Returns:
        outputs: name -> `difference_figures`, taps included.
        detections: reference, candidate, gained, lost: sums of `compare_detections`.
        mask_ious, mask_shifts, box_ious: of each query slot that detects in both models.
        merged_ious: of the merged masks of each sample where at least one model detects something.
        worst: the sample of the smallest of them and its two merged masks, or None.

    Raises:
        NotFinite: an output is not finite.
    """
    from tqdm import tqdm

    rows: dict[str, list] = {}
    detections = dict.fromkeys(("reference", "candidate", "gained", "lost"), 0)
    mask_ious, mask_shifts, box_ious, merged_ious, worst = [], [], [], [], None
    pairs = paired_outputs(models, batch_sizes, processor, samples, tokens)
    for sample, reference, candidate in tqdm(pairs, total=len(samples), unit="sample", disable=None):
        for name in reference:
            rows.setdefault(name, []).append(difference_row(reference[name], candidate[name]))
        found = compare_detections(sample, reference, candidate, score_threshold)
        for name in detections:
            detections[name] += found[name]
        mask_ious += found["ious"]
        mask_shifts += found["shifts"]
        box_ious += found["box_ious"]
        if found["reference"] or found["candidate"]:
            agreement = iou(*found["unions"])
            if worst is None or agreement < min(merged_ious):
                worst = sample, *found["unions"]
            merged_ious.append(agreement)
    return {
        "outputs": {name: difference_figures(values) for name, values in rows.items()},
        "detections": detections,
        "mask_ious": mask_ious,
        "mask_shifts": mask_shifts,
        "box_ious": box_ious,
        "merged_ious": merged_ious,
        "worst": worst,
    }


def draw_worst(path: Path, compared: dict) -> None:
    """Draw the sample whose merged masks agree least in `compare_models`' answer; where there is none, only say so."""
    from sam3_utils.report import overlay

    if not compared["worst"]:
        logger.warning("%s: not drawn, neither model detects anything", path)
        return
    sample, reference, candidate = compared["worst"]
    caption = f"{sample.prompt}: IoU {min(compared['merged_ious']):.3f}"
    aside = path.with_name(f"{path.name}.tmp{os.getpid()}")
    picture = overlay(
        load_rgb(sample.path, sample.size), reference, candidate, caption, names=("reference", "candidate")
    )
    picture.save(aside, format="PNG")
    aside.replace(path)
    print(f"worst pair: {sample.path}, {sample.prompt!r}: {path}")


def read_manifest(path: Path, hashes: dict[str, str], name: str) -> dict | None:
    """What the file that was written beside a model says of it; a missing or foreign one only warns.

    Args:
        path: the model; an ONNX file has export_report.json beside it, an OM `<stem>.manifest.json`, a checkpoint none.
            A split model of OMs has one for each: the answer is the detector's, and all of them as "parts".
        hashes: the SHA-256 of each of the model's files.
        name: the model, for the warning.
    """
    if is_split(path):
        parts = split_parts(path)
        path = parts["detector"]
        if path.suffix == ".om":
            found = {part: read_manifest(file, {file.name: hashes[file.name]}, name) for part, file in parts.items()}
            return None if None in found.values() else found["detector"] | {"parts": found}
    if path.is_dir():
        return None
    manifest = path.with_name("export_report.json" if path.suffix == ".onnx" else f"{path.stem}.manifest.json")
    try:
        text = manifest.read_text(encoding="utf-8")
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        logger.warning("%s: no %s beside it, so nothing is known of how it was made", name, manifest.name)
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s: %s cannot be read (%s)", name, manifest, error)
        return None
    strangers = [file for file, digest in hashes.items() if digest not in text]
    if strangers:
        logger.warning("%s: %s speaks of another file (SHA-256 of %s)", name, manifest, ", ".join(strangers))
        return None
    return content


def manifest_line(manifest: dict) -> str:
    """What a manifest says of how the model was made, in one line."""
    said = {name: manifest[name] for name in ("target_device", "soc_version") if manifest.get(name)}
    if isinstance(manifest.get("precision"), dict):
        said |= manifest["precision"]
    return ", ".join(f"{name} {value}" for name, value in said.items()) or "nothing of its precision"
