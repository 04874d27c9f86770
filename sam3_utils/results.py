# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Answers of the predictor as files: JSON, COCO, labelme, PNGs, and pictures to look at."""

import colorsys
import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from sam3_utils import files
from sam3_utils.masks import cut_out, polygons
from sam3_utils.postprocess import decode_rle
from sam3_utils.predictor import Answer

LOOK_SIDE = 2048  # an overlay is for looking: larger pictures are drawn smaller


def as_json(answer: Answer, prompt: dict) -> dict:
    """One answer as result.json and the service have it.

    Args:
        prompt: what was asked, such as {"text": "red car"} or {"points": [[x, y]], "labels": [1]}.
    """
    instances = [
        {"score": round(one.score, 6), "box_xyxy": one.box_xyxy and [round(value, 2) for value in one.box_xyxy],
         "area": one.area, "mask": one.rle}
        for one in answer.instances
    ]  # fmt: skip
    record = {"kind": answer.kind, "prompt": prompt, "instances": instances}
    if answer.presence is not None:
        record["presence"] = round(answer.presence, 6)
    if answer.object_score is not None:
        record |= {"object_score": round(answer.object_score, 6), "best": answer.best_index}
    return record


def label_of(record: dict) -> str:
    """What an annotation tool should call the instances of a record from `as_json`."""
    prompt = record["prompt"]
    return prompt.get("name") or prompt.get("text") or ("like the examples" if "exemplars" in prompt else "object")


def chosen(record: dict) -> list[dict]:
    """The instances that count: all of a concept, the best of a visual prompt's; without an empty mask."""
    instances = record["instances"] if record["kind"] == "concept" else [record["instances"][record["best"]]]
    return [instance for instance in instances if instance["area"]]


def mask_of(instance: dict) -> np.ndarray:
    """(H, W) bool."""
    return decode_rle(instance["mask"])


def labelme(name: str, size: tuple[int, int], records: list[dict], tolerance: float) -> dict:
    """labelme's JSON of a picture's records: a polygon for each part of each instance, parts of one instance sharing a
    group_id; `description` says what the polygons lose."""
    shapes = []
    for record in records:
        for instance in chosen(record):
            outlines, kept = polygons(mask_of(instance), tolerance)
            shapes += [
                {"label": label_of(record), "points": outline.tolist(), "group_id": len(shapes), "flags": {},
                 "shape_type": "polygon", "description": f"score {instance['score']:.3f}, polygon IoU {kept:.4f}"}
                for outline in outlines
            ]  # fmt: skip
    return {
        "version": "5.4.1", "flags": {}, "shapes": shapes, "imagePath": name, "imageData": None,
        "imageHeight": size[0], "imageWidth": size[1],
    }  # fmt: skip


def coco(pictures: list[dict]) -> dict:
    """A COCO file of many result.json: a category for each phrase, RLE masks, and the score of each annotation."""
    labels = dict.fromkeys(label_of(record) for picture in pictures for record in picture["results"])
    category_ids = {label: number for number, label in enumerate(labels, 1)}
    images, annotations = [], []
    for number, picture in enumerate(pictures, 1):
        image = picture["image"]
        images.append({"id": number, "file_name": image["path"], "height": image["height"], "width": image["width"]})
        for record in picture["results"]:
            for instance in chosen(record):
                x1, y1, x2, y2 = instance["box_xyxy"]
                annotations.append(
                    {"id": len(annotations) + 1, "image_id": number, "category_id": category_ids[label_of(record)],
                     "segmentation": instance["mask"], "area": instance["area"], "iscrowd": 0,
                     "bbox": [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)], "score": instance["score"]}
                )  # fmt: skip
    categories = [{"id": number, "name": label} for label, number in category_ids.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def _colour(number: int) -> np.ndarray:
    """Colours far from their neighbours: the hue turns by the golden angle."""
    return np.array(colorsys.hsv_to_rgb(number * 0.381966 % 1, 0.85, 1.0)) * 255


def draw(image: Image.Image, records: list[dict]) -> Image.Image:
    """The picture with every chosen instance in a colour of its own, its outline, label and score, and the clicks."""
    scale = min(1.0, LOOK_SIDE / max(image.size))
    look = image if scale == 1 else image.resize([max(1, round(side * scale)) for side in image.size])
    pixels, texts = np.asarray(look, dtype=np.float32).copy(), []
    for record in records:
        for instance in chosen(record):
            mask = Image.fromarray(mask_of(instance))
            mask = np.asarray(mask if scale == 1 else mask.resize(look.size, Image.NEAREST))
            colour = _colour(len(texts))
            inside = mask.copy()
            inside[1:-1, 1:-1] &= mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
            pixels[mask] = pixels[mask] * 0.5 + colour * 0.5
            pixels[mask & ~inside] = colour
            rows, columns = np.nonzero(mask)
            place = (int(columns.min()), max(0, int(rows.min()) - 12)) if len(rows) else (0, 0)
            texts.append((place, f"{label_of(record)} {instance['score']:.2f}", tuple(map(int, colour))))
    canvas = Image.fromarray(pixels.astype(np.uint8))
    pen = ImageDraw.Draw(canvas)
    for place, text, colour in texts:
        # Pillow's own font knows Latin letters only.
        text = text.encode("latin-1", "replace").decode("latin-1")
        pen.rectangle(pen.textbbox(place, text), fill=(0, 0, 0))
        pen.text(place, text, fill=colour)
    for record in records:
        prompt = record["prompt"]
        for (x, y), label in zip(prompt.get("points", ()), prompt.get("labels", ())):
            x, y, colour = x * scale, y * scale, (0, 220, 0) if label else (230, 0, 0)
            pen.ellipse((x - 5, y - 5, x + 5, y + 5), fill=colour, outline=(255, 255, 255), width=2)
        if "box" in prompt:
            pen.rectangle([value * scale for value in prompt["box"]], outline=(255, 255, 255), width=2)
    return canvas


def beside(panels: list[tuple[str, Image.Image]]) -> Image.Image:
    """Pictures of one size in a row, a caption over each."""
    width, height = panels[0][1].size
    canvas = Image.new("RGB", (width * len(panels), height + 16), (255, 255, 255))
    for column, (caption, panel) in enumerate(panels):
        canvas.paste(panel, (column * width, 16))
        ImageDraw.Draw(canvas).text((column * width + 4, 2), caption, fill=(0, 0, 0))
    return canvas


def write_folder(
    folder: Path, image: Image.Image, record: dict, writes: tuple[str, ...], tolerance: float, extra: dict
) -> None:
    """Write a picture's results into a folder that appears whole or not at all; one that is there is replaced.

    Args:
        record: of result.json: {"image": {"path", "image_id", "width", "height"}, "results": [from `as_json`], ...}.
        writes: "overlay", "masks", "cutouts", "labelme", beside result.json.
        tolerance: of labelme's polygons, in pixels.
        extra: file name -> Pillow picture.
    """
    aside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    results = record["results"]
    if "overlay" in writes:
        draw(image, results).save(aside / "overlay.png")
    for number, result in enumerate(results):
        for index, instance in enumerate(chosen(result)):
            stem = f"{number:02d}_{index:03d}.png"
            if "masks" in writes:
                Image.fromarray(mask_of(instance).astype(np.uint8) * 255).save(aside / f"mask_{stem}")
            if "cutouts" in writes:
                cut_out(image, mask_of(instance)).save(aside / f"cutout_{stem}")
    if "labelme" in writes:
        size = record["image"]["height"], record["image"]["width"]
        files.write_json(aside / "labelme.json", labelme(record["image"]["path"], size, results, tolerance))
    for name, picture in extra.items():
        picture.save(aside / name)
    files.write_json(aside / "result.json", record)
    if folder.exists():
        shutil.rmtree(folder)
    aside.replace(folder)
