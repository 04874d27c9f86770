# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Two models on the same inputs: how far their outputs lie apart, and whether that matters."""

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
from sam3_utils.cli import CheckFailed, UsageError
from sam3_utils.datasets import Sample, read_coco
from sam3_utils.images import PictureError, load_rgb, prepare
from sam3_utils.pipeline import run_batches
from sam3_utils.postprocess import instance_scores, resize_masks, union_mask
from sam3_utils.prompts import encode_phrases

logger = logging.getLogger(__name__)

# Phrases of different lengths, so that every row of a batch has another attention mask.
PHRASES = ("star", "small red circle", "two dogs on the grass")
DEMO_ROOT = Path("demo_output/coco2017")  # where README's commands draw it
DEMO_MAKER = Path(__file__).resolve().parent.parent / "assets" / "tiny_sam3" / "make_demo_data.py"
DEMO_PICTURES = 8  # 48 pairs, of which the tiny checkpoint detects something in 25
MASK_THRESHOLD = 0.5  # as the evaluators have it
LARGEST_HALF = 65504.0  # fp16's largest number; an NPU stops there instead of giving infinity
# Slots of one batch go through the same kernels: what may remain is another order of sums, 1e-6 in fp32, 1e-3 in fp16.
SLOT_BOUND = 0.01


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


def output_differences(reference: dict, candidate: dict) -> dict[str, dict[str, float]]:
    """Per output: `max_abs`, the largest difference, and `max_ref`, the largest reference value."""
    return {
        name: {
            "max_abs": float(np.abs(candidate[name] - reference[name]).max()),
            "max_ref": float(np.abs(reference[name]).max()),
        }
        for name in contract.OUTPUTS
    }


def verify_onnx(checkpoint_path: Path, onnx_path: Path, batches: tuple[int, ...]) -> dict[int, dict]:
    """`output_differences` of an exported graph against the untouched PyTorch model, for each batch size.

    The reference uses transformers' own modules and default attention, so that rewrites, tracing and graph passes
    are all under test. Called in a process of its own: both models are in memory.
    """
    from sam3_utils.backends import open_model
    from sam3_utils.checkpoint import load_processor

    processor = load_processor(checkpoint_path)
    reference, candidate = open_model(checkpoint_path), open_model(onnx_path)
    differences = {}
    for batch in batches:
        feeds = random_feeds(processor, reference.shapes.image_size, batch, seed=batch)
        differences[batch] = output_differences(reference.infer(feeds), candidate.infer(feeds))
    return differences


def difference_row(reference: np.ndarray, candidate: np.ndarray) -> tuple[float, ...]:
    """One sample's sums over one output, from which `difference_figures` makes its figures.

    Args:
        reference, candidate: one shape, float32, finite.

    Raises:
        CheckFailed: the shapes differ.
    """
    if reference.shape != candidate.shape:
        raise CheckFailed(f"the shapes differ: {reference.shape} in the reference, {candidate.shape} in the candidate")
    first, second = (array.ravel().astype(np.float64) for array in (reference, candidate))
    apart = np.abs(second - first)
    saturated = np.count_nonzero((np.abs(second) >= LARGEST_HALF) & (np.abs(first) < LARGEST_HALF))
    return (
        first.size, first.sum(), first @ first, second @ second, first @ second, apart @ apart, apart.max(),
        apart.sum(), saturated,
    )  # fmt: skip


def difference_figures(rows: list[tuple[float, ...]]) -> dict[str, float]:
    """How far one output of two models lies apart, from each sample's `difference_row`.

    Returns:
        max_abs, mean_abs: over all values.
        cosine: of the worst sample; of all samples as one vector where a sample has one value (presence_logits).
        relative: root mean square difference, in units of the reference's standard deviation, at least a twentieth of
            its root mean square: a random model's values lie closer together than 16 bits resolve. For one value a
            sample, a logit, in units of the root mean square, at least 1. Unlike the cosine it sees values that are
            unrelated but lie far from 0. The worst sample alone would judge masks of absent things, which drift most.
        saturated: values at fp16's limit that are not there in the reference. An NPU gives these, not infinity.
    """
    size, total, rr, cc, rc, dd, largest, absolute, saturated = np.array(rows, dtype=np.float64).T
    count, size = size.sum(), size[0]
    square = rr.sum() / count
    deviation = np.sqrt(max(0.0, square - (total.sum() / count) ** 2))
    scale = max(1.0, np.sqrt(square)) if size == 1 else max(deviation, np.sqrt(square) / 20) or 1.0
    if size == 1:
        rr, cc, rc = (values.sum(keepdims=True) for values in (rr, cc, rc))
    norms = np.sqrt(rr * cc)
    cosine = np.where(norms > 0, rc / np.where(norms > 0, norms, 1), rr == cc)
    return {
        "max_abs": float(largest.max()),
        "mean_abs": float(absolute.sum() / count),
        "cosine": float(cosine.min()),
        "relative": float(np.sqrt(dd.sum() / count) / scale),
        "saturated": int(saturated.sum()),
    }


def compare_detections(sample: Sample, reference: dict, candidate: dict, score_threshold: float) -> dict:
    """What two models detect on one sample, query slot by query slot.

    Args:
        reference, candidate: one sample's outputs by the contract's names, without the batch dimension.

    Returns:
        reference, candidate: how many queries score above the threshold; gained, lost: how many do so on one side only.
        ious: IoU of the picture-size masks of each query that both detect (1 when both masks are empty).
        shifts: `mask_shift` of the same queries.
        unions: both sides' merged masks, (height, width) bool, as the COCO evaluator merges them.
    """
    sides = (reference, candidate)
    first, second = (
        instance_scores(side["pred_logits"][None], side["presence_logits"][None])[0] > score_threshold for side in sides
    )
    both = first & second
    resized = (resize_masks(side["pred_masks"][both], sample.size, MASK_THRESHOLD) for side in sides)
    return {
        "reference": int(first.sum()),
        "candidate": int(second.sum()),
        "gained": int((second & ~first).sum()),
        "lost": int((first & ~second).sum()),
        "ious": [_iou(*masks) for chunks in zip(*resized) for masks in zip(*chunks)],
        "shifts": [mask_shift(*masks) for masks in zip(*(side["pred_masks"][both] for side in sides))],
        "unions": [
            union_mask(side["pred_masks"][kept], sample.size, MASK_THRESHOLD)
            for side, kept in zip(sides, (first, second))
        ],
    }


def _iou(first: np.ndarray, second: np.ndarray) -> float:
    union = np.count_nonzero(first | second)
    return np.count_nonzero(first & second) / union if union else 1.0


def mask_shift(reference: np.ndarray, candidate: np.ndarray) -> float:
    """By how many cells, along its worse axis, one (M, M) mask of logits lies beside the other.

    The least-squares solution of `candidate - reference = -shift . gradient` (Lucas and Kanade 1981), about right up to
    a cell or two. A mask as fine as facebook/sam3's may lie one cell off at an IoU of 0.95; rounding moves none.
    """
    first, second = reference.astype(np.float64), candidate.astype(np.float64)
    gradients = np.stack([axis.ravel() for axis in np.gradient((first + second) / 2)], axis=1)
    return float(np.abs(np.linalg.lstsq(gradients, (first - second).ravel(), rcond=1e-3)[0]).max())


def given_samples(images: list[Path], phrases: list[str]) -> list[Sample]:
    """Every phrase on every picture, no masks known.

    Raises:
        UsageError: a picture cannot be used.
    """
    samples = []
    for image_id, path in enumerate(dict.fromkeys(images)):
        try:
            image = load_rgb(path)
        except PictureError as error:
            raise UsageError(f"--images: {error}; give picture files") from None
        size = image.height, image.width
        samples += [Sample(image_id, index, text, path, size, ()) for index, text in enumerate(dict.fromkeys(phrases))]
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


def slot_difference(model, batch_size: int, processor, sample: Sample, tokens: dict) -> dict:
    """The same picture and phrase in every slot of one batch: how far the worst slot is from slot 0.

    Returns:
        relative (as in `difference_figures`), and the output and the slot where it is.

    Raises:
        NotFinite: an output is not finite.
    """
    pixel_values = prepare(processor, load_rgb(sample.path, sample.size))
    feeds = dict(zip(contract.INPUTS, (pixel_values, *tokens[sample.prompt])))
    outputs = model.infer({name: np.repeat(array[None], batch_size, axis=0) for name, array in feeds.items()})
    return max(
        (
            {"relative": difference_figures([difference_row(array[0], array[slot])])["relative"],
             "output": name, "slot": slot, "batch": batch_size}
            for name, array in outputs.items()
            for slot in range(1, batch_size)
        ),
        key=lambda found: found["relative"],
    )  # fmt: skip


def compare_models(
    models: tuple, batch_sizes: tuple[int, int], processor, samples: list[Sample], tokens: dict, score_threshold: float
) -> dict:
    """Run reference and candidate (from `named`) over `samples`.

    Returns:
        outputs: name -> `difference_figures`, taps included.
        detections: reference, candidate, gained, lost: sums of `compare_detections`.
        mask_ious, mask_shifts: of each query slot that detects in both models.
        merged_ious: of the merged masks of each sample where at least one model detects something.
        worst: the sample of the smallest of them and its two merged masks, or None.

    Raises:
        NotFinite: an output is not finite.
    """
    from tqdm import tqdm

    rows: dict[str, list] = {}
    detections = dict.fromkeys(("reference", "candidate", "gained", "lost"), 0)
    mask_ious, mask_shifts, merged_ious, worst = [], [], [], None
    pairs = paired_outputs(models, batch_sizes, processor, samples, tokens)
    for sample, reference, candidate in tqdm(pairs, total=len(samples), unit="sample", disable=None):
        for name in reference:
            rows.setdefault(name, []).append(difference_row(reference[name], candidate[name]))
        found = compare_detections(sample, reference, candidate, score_threshold)
        for name in detections:
            detections[name] += found[name]
        mask_ious += found["ious"]
        mask_shifts += found["shifts"]
        if found["reference"] or found["candidate"]:
            iou = _iou(*found["unions"])
            if worst is None or iou < min(merged_ious):
                worst = sample, *found["unions"]
            merged_ious.append(iou)
    return {
        "outputs": {name: difference_figures(values) for name, values in rows.items()},
        "detections": detections,
        "mask_ious": mask_ious,
        "mask_shifts": mask_shifts,
        "merged_ious": merged_ious,
        "worst": worst,
    }


def judge(compared: dict, slots: dict[str, dict], limits: dict[str, float]) -> list[dict]:
    """Hold the figures of `compare_models` and `slot_difference` against the limits.

    Args:
        slots: side -> its `slot_difference`; sides with batches of one are left out.
        limits: min_cosine, max_relative_difference, max_level_difference, min_mask_iou, max_mask_shift, min_mean_iou,
            max_changed_detections.

    Returns:
        For each gate: gate, of (what it judges), value, sign ("<=" or ">="), bound, passed. Gates that have nothing to
        judge are left out.
    """
    gates = []

    def gate(name: str, of: str, value: float, sign: str, bound: float) -> None:
        passed = value >= bound if sign == ">=" else value <= bound  # false for NaN
        gates.append({"gate": name, "of": of, "value": value, "sign": sign, "bound": bound, "passed": passed})

    for name, row in compared["outputs"].items():
        level = name not in contract.OUTPUTS
        gate("cosine", name, row["cosine"], ">=", limits["min_cosine"])
        if level:
            gate("level difference", name, row["relative"], "<=", limits["max_level_difference"])
        else:
            gate("relative difference", name, row["relative"], "<=", limits["max_relative_difference"])
        gate("saturated values", name, row["saturated"], "<=", 0)
    counts = compared["detections"]
    if compared["mask_ious"]:
        pairs = f"worst of {len(compared['mask_ious'])} masks"
        gate("mask IoU", pairs, min(compared["mask_ious"]), ">=", limits["min_mask_iou"])
        gate("mask shift (cells)", pairs, max(compared["mask_shifts"]), "<=", limits["max_mask_shift"])
    if compared["merged_ious"]:
        samples = len(compared["merged_ious"])
        gate("Mean IoU", f"{samples} samples", sum(compared["merged_ious"]) / samples, ">=", limits["min_mean_iou"])
        changed = counts["gained"] + counts["lost"]
        share = changed / max(1, counts["reference"])
        limit = limits["max_changed_detections"]
        gate("changed detections", f"{changed} to {counts['reference']}", share, "<=", limit)
    for side, found in slots.items():
        where = f"{found['output']}, slot {found['slot']} of 0..{found['batch'] - 1}"
        gate(f"{side}'s slots", where, found["relative"], "<=", SLOT_BOUND)
    return gates


def draw_worst(path: Path, compared: dict) -> None:
    """Draw the sample whose merged masks agree least in `compare_models`' answer; where there is none, only say so."""
    from sam3_utils.report import overlay

    if not compared["worst"]:
        logger.warning("%s: not drawn, neither model detects anything", path)
        return
    sample, reference, candidate = compared["worst"]
    caption = (
        f"{sample.prompt}: IoU {min(compared['merged_ious']):.3f}, here annotated = reference, predicted = candidate"
    )
    aside = path.with_name(f"{path.name}.tmp{os.getpid()}")
    overlay(load_rgb(sample.path, sample.size), reference, candidate, caption).save(aside, format="PNG")
    aside.replace(path)
    print(f"worst pair: {sample.path}, {sample.prompt!r}: {path}")


def read_manifest(path: Path, hashes: dict[str, str], name: str) -> dict | None:
    """What the file that was written beside a model says of it; a missing or foreign one only warns.

    Args:
        path: the model; an ONNX file has export_report.json beside it, an OM `<stem>.manifest.json`, a checkpoint none.
        hashes: the SHA-256 of each of the model's files.
        name: the model, for the warning.
    """
    if path.is_dir():
        return None
    manifest = path.with_name("export_report.json" if path.suffix == ".onnx" else f"{path.stem}.manifest.json")
    try:
        text = manifest.read_text(encoding="utf-8")
        content = json.loads(text)
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
    said = {name: manifest[name] for name in ("target_device", "soc_version", "attention") if manifest.get(name)}
    if isinstance(manifest.get("precision"), dict):
        said |= manifest["precision"]
    return ", ".join(f"{name} {value}" for name, value in said.items()) or "nothing of its precision"


def spread(values: list[float]) -> dict[str, float] | None:
    """Count, smallest, mean and largest of some figures, or None."""
    if not values:
        return None
    return {"count": len(values), "min": min(values), "mean": sum(values) / len(values), "max": max(values)}
