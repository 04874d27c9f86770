# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The three SAM3 paths of Roboflow's inference server, for clients that speak them; off unless `--roboflow_compat`.

The same word means two things there: x, y of a box is its top left corner in a concept, its centre in a visual prompt.
What is not done here is refused, not passed over: other image types than base64, NMS, logits kept between calls (this
service has sessions for that).
"""

import time
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field, FiniteFloat

from sam3_utils.engine import ApiError, Engine, decoded
from sam3_utils.masks import polygons
from sam3_utils.predictor import PostProcess, PromptError


class InferenceImage(BaseModel):
    type: str
    value: str = ""


class Request(BaseModel):
    image: InferenceImage | None = None
    image_id: str | None = None


class ConceptBox(BaseModel):
    """x, y, width, height with the top left corner, or x0, y0, x1, y1."""

    x: FiniteFloat | None = None
    y: FiniteFloat | None = None
    width: FiniteFloat | None = None
    height: FiniteFloat | None = None
    x0: FiniteFloat | None = None
    y0: FiniteFloat | None = None
    x1: FiniteFloat | None = None
    y1: FiniteFloat | None = None


class ConceptPrompt(BaseModel):
    type: Literal["text", "visual"] = "text"
    text: str | None = None
    boxes: list[ConceptBox] = []
    box_labels: list[int] | None = None
    output_prob_thresh: float | None = Field(None, ge=0, le=1)


class ConceptRequest(Request):
    prompts: list[ConceptPrompt] = Field(min_length=1, max_length=32)
    output_prob_thresh: float = Field(0.5, ge=0, le=1)
    format: Literal["polygon", "rle"] = "polygon"
    nms_iou_threshold: float | None = None


class VisualPoint(BaseModel):
    x: FiniteFloat
    y: FiniteFloat
    positive: bool = True


class VisualBox(BaseModel):
    """x, y is the centre."""

    x: FiniteFloat
    y: FiniteFloat
    width: FiniteFloat
    height: FiniteFloat


class VisualPrompt(BaseModel):
    box: VisualBox | None = None
    points: list[VisualPoint] = []


class VisualPrompts(BaseModel):
    prompts: list[VisualPrompt] = Field(min_length=1, max_length=64)


class VisualRequest(Request):
    prompts: VisualPrompts
    multimask_output: bool = True
    format: Literal["json", "polygon", "rle"] = "json"
    save_logits_to_cache: bool = False
    load_logits_from_cache: bool = False


def concept_corners(box: ConceptBox, where: str) -> list[float]:
    """x1, y1, x2, y2."""
    if None not in (box.x0, box.y0, box.x1, box.y1):
        return [box.x0, box.y0, box.x1, box.y1]
    if None in (box.x, box.y, box.width, box.height):
        raise ApiError(422, "bad_prompt", "give x, y, width, height, or x0, y0, x1, y1", where)
    return [box.x, box.y, box.x + box.width, box.y + box.height]


def visual_corners(box: VisualBox) -> list[float]:
    """x1, y1, x2, y2."""
    half_width, half_height = box.width / 2, box.height / 2
    return [box.x - half_width, box.y - half_height, box.x + half_width, box.y + half_height]


def prediction(instance, form: str) -> dict:
    """An instance as that server writes it: masks are polygons, lists of x, y, or one COCO RLE."""
    if form == "rle":
        return {"masks": instance.rle, "confidence": instance.score, "format": "rle"}
    outlines, _ = polygons(instance.mask)
    masks = [outline.round(1).tolist() for outline in outlines]
    return {"masks": masks, "confidence": instance.score, "format": "polygon"}


def add_paths(api: APIRouter, engine: Engine) -> None:
    """Add /sam3/embed_image, /sam3/concept_segment and /sam3/visual_segment."""

    def picture_of(body: Request) -> dict:
        if body.image is None:
            return engine.known_image(body.image_id or "")
        if body.image.type != "base64":
            raise ApiError(422, "bad_prompt", f"{body.image.type!r}: only base64 is taken", "image.type")
        return engine.keep_image(decoded(body.image.value), "picture")

    @api.post("/sam3/embed_image", tags=["roboflow"])
    def embed_image(body: Request) -> dict:
        """Encode a picture; its id is this service's, the SHA-256 of its bytes."""
        started, stored = time.perf_counter(), picture_of(body)
        engine.on_device(stored["image_id"], lambda predictor: engine.take_picture(predictor, stored, {}))
        return {"image_id": stored["image_id"], "time": time.perf_counter() - started}

    @api.post("/sam3/concept_segment", tags=["roboflow"])
    def concept_segment(body: ConceptRequest) -> dict:
        """Everything that a phrase names, or that looks like boxes."""
        if body.nms_iou_threshold is not None:
            raise ApiError(422, "bad_prompt", "there is no NMS here", "nms_iou_threshold")
        started, stored = time.perf_counter(), picture_of(body)

        def work(predictor):
            engine.take_picture(predictor, stored, {})
            found = []
            for index, prompt in enumerate(body.prompts):
                where = f"prompts[{index}]"
                boxes = [concept_corners(box, f"{where}.boxes[{n}]") for n, box in enumerate(prompt.boxes)]
                threshold = body.output_prob_thresh if prompt.output_prob_thresh is None else prompt.output_prob_thresh
                options = PostProcess(score_threshold=threshold)
                try:
                    if prompt.type == "visual" and not prompt.text:
                        answer = predictor.predict_exemplars(boxes, prompt.box_labels, options)
                    else:
                        answer = predictor.predict_text(prompt.text or "", boxes, prompt.box_labels, options)
                except PromptError as error:
                    raise ApiError(422, "bad_prompt", str(error), f"{where}.{error.field}") from None
                echo = {"prompt_index": index, "type": prompt.type, "text": prompt.text, "num_boxes": len(boxes)}
                predictions = [prediction(one, body.format) for one in answer.instances]
                found.append({"prompt_index": index, "echo": echo, "predictions": predictions})
            return found

        results = engine.on_device(stored["image_id"], work)
        return {"prompt_results": results, "time": time.perf_counter() - started}

    @api.post("/sam3/visual_segment", tags=["roboflow"])
    def visual_segment(body: VisualRequest) -> dict:
        """One object for each prompt, the best mask of it."""
        if body.load_logits_from_cache or body.save_logits_to_cache:
            name = "load_logits_from_cache" if body.load_logits_from_cache else "save_logits_to_cache"
            raise ApiError(422, "bad_prompt", "not kept here; /v1/segment/points has sessions", name)
        started, stored = time.perf_counter(), picture_of(body)

        def work(predictor):
            engine.take_picture(predictor, stored, {})
            found = []
            for index, prompt in enumerate(body.prompts.prompts):
                points = [(point.x, point.y) for point in prompt.points]
                labels = [int(point.positive) for point in prompt.points]
                box = visual_corners(prompt.box) if prompt.box else None
                try:
                    answer = predictor.predict_points(points, labels, box, body.multimask_output)
                except PromptError as error:
                    raise ApiError(422, "bad_prompt", str(error), f"prompts.prompts[{index}].{error.field}") from None
                found.append(prediction(answer.best, "rle" if body.format == "rle" else "polygon"))
            return found

        predictions = engine.on_device(stored["image_id"], work)
        return {"predictions": predictions, "time": time.perf_counter() - started}
