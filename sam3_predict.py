#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Segment your own pictures with words, boxes and clicks.

Two kinds of prompt: words and exemplars find everything of a kind (a concept), clicks and a box cut out one object.

Example:
    python3 sam3_predict.py --model_path ./sam3_model --images ./photos --text "red car" person --output_dir ./masks
    python3 sam3_predict.py --model_path ./sam3_model --images street.jpg --points 210,95 250,120,0 --output_dir ./masks

Reads:  a model of any kind; for an .onnx, an .om or a split model also the processor files in --processor_path
Writes: <output_dir>/<name>.<first 8 digits of its SHA-256>/result.json and what --write names, for each picture;
        <output_dir>/coco.json and summary.json for all. A run that was stopped goes on with the same command.
Exit:   0 all pictures done, 1 some could not be used (they are listed), 2 wrong usage.
"""

import argparse
import json
import logging
import math
import time
from dataclasses import asdict, fields
from pathlib import Path

from sam3_utils.cli import UsageError, add_dtype, add_model_path, make_parser, one_path, positive_int, run

logger = logging.getLogger("sam3_predict")
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".jp2")
SHOW, SIDES = "model_input.png", "side_by_side.png"


def numbers(counts: tuple[int, ...]):
    """argparse type: so many numbers, separated by commas."""

    def parse(text: str) -> list[float]:
        values = [float(value) for value in text.split(",")]
        if len(values) not in counts or not all(map(math.isfinite, values)):
            raise ValueError(text)
        if len(counts) > 1 and len(values) == max(counts) and values[-1] not in (0, 1):
            raise argparse.ArgumentTypeError(f"{text}: the label is 1 for what is meant, 0 for what is not")
        return values

    parse.__name__ = f"{' or '.join(map(str, counts))} numbers with commas between"
    return parse


def parse_args(argv=None):
    parser = make_parser(__doc__)
    add_model_path(parser, required=True)
    parser.add_argument(
        "--processor_path", type=Path, help="folder of the processor and tokenizer files; not given: the checkpoint"
    )
    parser.add_argument(
        "--images", nargs="+", type=Path, required=True, help="pictures, folders of them, or .txt lists, a path a line"
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="where results go")
    prompts = parser.add_argument_group("prompts, in pixels of the picture as it is seen")
    prompts.add_argument("--text", nargs="+", default=[], metavar="PHRASE", help="phrases, each a concept of its own")
    prompts.add_argument(
        "--exemplars", nargs="+", default=[], type=numbers((4, 5)), metavar="X1,Y1,X2,Y2[,LABEL]",
        help="boxes that show what is meant (label 1, the default) or what is not (0); with --text or alone",
    )  # fmt: skip
    prompts.add_argument(
        "--points", nargs="+", default=[], type=numbers((2, 3)), metavar="X,Y[,LABEL]",
        help="clicks on one object: 1 this (the default), 0 not this",
    )  # fmt: skip
    prompts.add_argument("--box", type=numbers((4,)), metavar="X1,Y1,X2,Y2", help="a box around one object")
    parser.add_argument("--device", help="as in all scripts; auto: the fastest way on this CPU (cpu if not given)")
    add_dtype(parser, "a checkpoint")
    parser.add_argument("--image_size", type=positive_int, help="side of the pictures, for a checkpoint")
    parser.add_argument(
        "--write", nargs="+", default=["overlay", "masks"], choices=("overlay", "masks", "cutouts", "labelme"),
        help="beside result.json, which holds all masks as COCO RLE",
    )  # fmt: skip
    looks = parser.add_argument_group("masks")
    looks.add_argument("--score_threshold", type=float, default=0.5, help="of a concept's instances")
    looks.add_argument("--mask_threshold", type=float, default=0.5, help="probability, of a concept's masks")
    looks.add_argument("--click_threshold", type=float, default=0.0, help="logit, of masks from clicks and boxes")
    looks.add_argument("--max_detections", type=positive_int, default=100, help="instances of a concept, best first")
    for name, text in (
        ("max_hole_area", "fill holes of up to so many pixels"),
        ("max_island_area", "remove islands of up to so many pixels"),
        ("opening", "radius in pixels: removes what is thinner"),
        ("closing", "radius in pixels: closes gaps that are thinner"),
    ):
        looks.add_argument(f"--{name}", type=int, default=0, help=text)
    looks.add_argument(
        "--polygon_tolerance", type=float, default=1.0, help="how far labelme's polygons may be off, in pixels"
    )
    parser.add_argument("--show_input", action="store_true", help=f"write {SHOW}: the picture as the model sees it")
    parser.add_argument(
        "--side_by_side", action="store_true",
        help=f"write {SIDES}: the best instance of the first phrase by word, by box and by click",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace earlier results in --output_dir")
    return parser.parse_args(argv)


def listed(paths: list[Path]) -> list[Path]:
    """The pictures that `paths` name, each once, in order.

    Raises:
        UsageError: nothing is there, or a list names nothing.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() in PICTURES)
            if not inside:
                raise UsageError(f"--images {path}: no picture in it (known: {' '.join(PICTURES)})")
            found += inside
        elif path.suffix.lower() == ".txt":
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [path.parent / line.strip() for line in lines if line.strip()]
        else:
            found.append(path)
    if not found:
        raise UsageError(f"--images {paths[0]}: an empty list")
    return list(dict.fromkeys(found))


def ask(predictor, args, options) -> list[dict]:
    """All prompts on the predictor's picture, as result.json has them."""
    from sam3_utils.results import as_json

    records = []
    boxes, labels = [box[:4] for box in args.exemplars], [box[4] if len(box) > 4 else 1 for box in args.exemplars]
    shown = {"exemplars": boxes, "labels": labels} if boxes else {}
    for text in args.text:
        records.append(as_json(predictor.predict_text(text, boxes, labels, options), {"text": text} | shown))
    if boxes and not args.text:
        records.append(as_json(predictor.predict_exemplars(boxes, labels, options), shown))
    if args.points or args.box:
        points, kinds = [p[:2] for p in args.points], [p[2] if len(p) > 2 else 1 for p in args.points]
        prompt = ({"points": points, "labels": kinds} if points else {}) | ({"box": args.box} if args.box else {})
        records.append(as_json(predictor.predict_points(points, kinds, args.box, options=options), prompt))
    return records


def compare_prompts(predictor, image, record: dict, options):
    """The best instance of a concept by word, by its box and by a click in its middle: a picture, and the IoUs of the
    second and third with the first; None where there is no instance."""
    from sam3_utils.differences import iou
    from sam3_utils.masks import box_of, middle_of
    from sam3_utils.results import as_json, beside, chosen, draw, mask_of

    if not chosen(record):
        return None, None
    word = mask_of(chosen(record)[0])
    box, point = box_of(word), middle_of(word)
    by_box = as_json(predictor.predict_box(box, options), {"box": box})
    by_click = as_json(predictor.predict_points([point], options=options), {"points": [point], "labels": [1]})
    ious = {}
    panels = [("word", draw(image, [record | {"instances": chosen(record)[:1]}]))]
    for name, found in (("box", by_box), ("click", by_click)):
        ious[name] = round(iou(mask_of(found["instances"][found["best"]]), word), 4)
        panels.append((f"{name}: IoU with word {ious[name]:.3f}", draw(image, [found])))
    return beside(panels), ious


def predict(predictor, path: Path, image_id: str, folder: Path, args, options) -> None:
    """One picture from file to result folder."""
    from sam3_utils.predictor import open_image
    from sam3_utils.results import write_folder
    from sam3_utils.stages import stage

    with stage("decode"):
        image = open_image(path)
    predictor.set_image(image, image_id)
    records = ask(predictor, args, options)
    height, width = predictor.size
    result = {"image": {"path": path.name, "image_id": image_id, "width": width, "height": height}, "results": records}
    extra = {}
    if args.show_input:
        extra[SHOW] = predictor.shown_to_model(image)
    if args.side_by_side and args.text:
        picture, result["side_by_side"] = compare_prompts(predictor, image, records[0], options)
        extra |= {SIDES: picture} if picture else {}
    with stage("write"):
        write_folder(folder, image, result, tuple(args.write), args.polygon_tolerance, extra)


def main(argv=None) -> int:
    args = parse_args(argv)
    if not (args.text or args.exemplars or args.points or args.box):
        raise UsageError("no prompt: give --text, --exemplars, --points or --box")
    if args.side_by_side and not args.text:
        raise UsageError("--side_by_side needs --text, for the object to compare")
    model_path, pictures = one_path(args.model_path, "--model_path"), listed(args.images)
    from tqdm import tqdm

    from sam3_utils import files
    from sam3_utils.backends import describe_model, fit_processor, open_model
    from sam3_utils.checkpoint import load_processor, processor_files
    from sam3_utils.images import PictureError
    from sam3_utils.pipeline import open_run_folder
    from sam3_utils.predictor import PostProcess, Predictor, PromptError, image_id_of
    from sam3_utils.report import versions
    from sam3_utils.results import coco
    from sam3_utils.stages import peak_memory_mib, seconds_by_stage

    options = PostProcess(**{field.name: getattr(args, field.name) for field in fields(PostProcess)})
    processor_path = args.processor_path or model_path
    processor = load_processor(processor_path)
    model = open_model(model_path, args.device, args.dtype, args.image_size)
    fit_processor(processor, model, processor_path, model_path)
    names = ("text", "exemplars", "points", "box", "write", "polygon_tolerance", "show_input", "side_by_side")
    identity = {
        "model": describe_model(model_path, model.runtime, model.precision),
        "processor": {path.name: files.sha256(path) for path in processor_files(processor_path)},
        "device": model.device,
        "settings": {name: getattr(args, name) for name in names} | asdict(options),
    }
    output_names = ("summary.json", "coco.json", *(path.name for path in args.output_dir.glob("*.????????/")))
    open_run_folder(args.output_dir, identity, output_names, args.overwrite)
    started, predictor = time.perf_counter(), Predictor(model, processor, cache_bytes=0)
    done, failed = [], {}
    for path in tqdm(pictures, unit="picture", disable=None):
        try:
            image_id = image_id_of(path)
            folder = args.output_dir / f"{path.stem}.{image_id[:8]}"
            if not (folder / "result.json").is_file():
                predict(predictor, path, image_id, folder, args, options)
            done.append(folder)
        except (PictureError, PromptError, OSError) as error:
            if isinstance(error, OSError) and error.filename != str(path):
                raise  # not this picture's fault
            failed[str(path)] = str(error)
            logger.warning("%s", error if str(path) in str(error) else f"{path}: {error}")
    model.close()
    results = [json.loads((folder / "result.json").read_text(encoding="utf-8")) for folder in dict.fromkeys(done)]
    files.write_json(args.output_dir / "coco.json", coco(results))
    summary = identity | {
        "pictures": len(pictures), "failed": failed, "versions": versions(),
        "seconds": round(time.perf_counter() - started, 2),
        "seconds_by_stage": {name: round(value, 3) for name, value in seconds_by_stage().items()},
        "peak_memory_mib": peak_memory_mib(),
    }  # fmt: skip
    files.write_json(args.output_dir / "summary.json", summary)
    found = sum(len(result["instances"]) for picture in results for result in picture["results"])
    print(f"{len(results)} of {len(pictures)} pictures, {found} masks ({model.runtime}, {model.device})")
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
