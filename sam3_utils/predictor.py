# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Words, boxes and clicks on a picture whose features are kept: `set_image` once, then one `predict_...` after another.

Two kinds of question, never mixed up: a *concept* (words, or boxes as examples) finds every instance of it in the
picture; a *visual* prompt (clicks, or one box) cuts out this one object.

    predictor = Predictor(open_model(Path("sam3_onnx_cpu"), "auto"), load_processor(Path("sam3_model")))
    predictor.set_image("street.jpg")
    cars = predictor.predict_text("red car").instances
    this = predictor.predict_points([(210, 95)]).best.mask

Coordinates are pixels of the picture as it is seen (its EXIF orientation applied), x to the right, y down; boxes are
x1, y1, x2, y2. A predictor is for one thread.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from sam3_utils import contract
from sam3_utils.cli import UsageError
from sam3_utils.images import decode_rgb, load_rgb, prepare
from sam3_utils.masks import box_of, clean_mask
from sam3_utils.postprocess import decode_rle, encode_rle, instance_scores, resize_masks
from sam3_utils.prompts import encode_phrases
from sam3_utils.stages import stage

CACHE_BYTES = 2_000_000_000  # 15 pictures of facebook/sam3 with words and clicks in float32
VISUAL_WORD = "visual"  # what SAM3 was trained to read where boxes alone say what is meant


class PromptError(UsageError):
    """A prompt that cannot be answered; `field` names the part of it that is wrong."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class PostProcess:
    """What is done to masks; see `masks.clean_mask` for the last four."""

    score_threshold: float = 0.5  # of a concept's instances
    mask_threshold: float = 0.5  # probability, of a concept's masks
    click_threshold: float = 0.0  # logit, of a visual prompt's masks
    max_detections: int = 100
    max_hole_area: int = 0
    max_island_area: int = 0
    opening: int = 0
    closing: int = 0


@dataclass(frozen=True)
class Instance:
    """One object: its score in 0..1, box_xyxy in pixels (the model's for concepts, the mask's for visual prompts; None
    for an empty mask) and mask, COCO RLE of the picture's size."""

    score: float
    box_xyxy: list[float] | None
    area: int
    rle: dict

    @property
    def mask(self) -> np.ndarray:
        """(H, W) bool."""
        return decode_rle(self.rle)


@dataclass(frozen=True)
class Answer:
    """To a concept: its instances, best first. To a visual prompt: one mask, or three to choose from, as the model
    orders them."""

    kind: str  # "concept" or "visual"
    instances: list[Instance]
    presence: float | None = None  # is there anything of that name? of a concept
    object_score: float | None = None  # is there an object? of a visual prompt
    logits: np.ndarray | None = field(default=None, repr=False)  # (K, A, A) of a visual prompt, for `mask_input`

    @property
    def best_index(self) -> int:
        """Of a visual prompt's masks, the one with the highest score."""
        return max(range(len(self.instances)), key=lambda index: self.instances[index].score)

    @property
    def best(self) -> Instance:
        """The instance of `best_index`; ValueError where a concept has none."""
        return self.instances[self.best_index]


class FeatureCache:
    """Pictures' features, the least recently used dropped when their bytes are over a bound."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.bytes, self.hits, self.misses, self.evictions = max_bytes, 0, 0, 0, 0
        self._entries: OrderedDict[str, dict] = OrderedDict()

    def get(self, key: str) -> dict | None:
        """The features of a picture, or None; counts a hit or a miss."""
        if key not in self._entries:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: str, features: dict) -> None:
        """Keep or replace a picture's features; what alone is over the bound is kept nevertheless, until the next."""
        self.drop(key)
        self._entries[key] = features
        self.bytes += _bytes(features)
        while self.bytes > self.max_bytes and len(self._entries) > 1:
            self.drop(next(iter(self._entries)))
            self.evictions += 1

    def drop(self, key: str) -> bool:
        """Forget a picture; was it there?"""
        features = self._entries.pop(key, None)
        self.bytes -= _bytes(features or {})
        return features is not None

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


def _bytes(features: dict) -> int:
    return sum(array.nbytes for array in features.values())


def image_id_of(image) -> str:
    """Hex SHA-256 of a picture: of a file's or its bytes' content, of an array's or a Pillow picture's pixels."""
    if isinstance(image, (str, Path)):
        image = Path(image).read_bytes()
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    pixels = np.asarray(image)
    return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()


def open_image(image) -> Image.Image:
    """A picture from a path, a file's bytes, a Pillow picture, or an (H, W, 3) uint8 array, as RGB.

    Raises:
        images.PictureError: it cannot be decoded, or is too large.
        PromptError: an array of another shape or dtype.
    """
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise PromptError("image", f"an array of {image.dtype} {image.shape}; (height, width, 3) uint8 is known")
        return Image.fromarray(image)
    if isinstance(image, bytes):
        return decode_rgb(image)
    return image.convert("RGB") if isinstance(image, Image.Image) else load_rgb(Path(image))


class Predictor:
    """Answers to prompts on the picture of the last `set_image`."""

    def __init__(self, model, processor, cache_bytes: int = CACHE_BYTES):
        """
        Args:
            model: from `backends.open_model`, closed by the caller. processor: of the same checkpoint.
            cache_bytes: of features that are kept for pictures to which a caller comes back.
        """
        self.model, self.cache = model, FeatureCache(cache_bytes)
        self._processor = processor
        self.image_id, self.size = None, None

    def set_image(self, image, image_id: str | None = None) -> str:
        """Take a picture, encoding it unless its features are kept; all prompts are asked of it until the next one.

        Args:
            image: a path, a file's bytes, a Pillow picture, or an (H, W, 3) uint8 array.
            image_id: its `image_id_of`, where the caller knows it.

        Returns:
            The picture's id.
        """
        image_id = image_id or image_id_of(image)
        with stage("decode"):
            picture = open_image(image)
        if image_id not in self.cache:
            with stage("prepare"):
                pixel_values = prepare(self._processor, picture)
            self.cache.misses += 1
            self.cache.put(image_id, dict(self.model.encode_picture(pixel_values)))
        self.image_id, self.size = image_id, (picture.height, picture.width)
        return image_id

    def use_image(self, image_id: str, size: tuple[int, int]) -> bool:
        """Take a picture by its id and (height, width) if its features are kept; are they?"""
        if image_id not in self.cache:
            return False
        self.image_id, self.size = image_id, size
        return True

    def predict_text(
        self, text: str, boxes: Sequence = (), labels: Sequence[int] | None = None, options: PostProcess = PostProcess()
    ) -> Answer:
        """Everything that `text` names, a concept.

        Args:
            boxes: examples in this picture, boxes in pixels. labels: 1 for such as is meant, 0 for such as is not; all
                1 if not given.

        Raises:
            PromptError: the phrase is empty or over 32 tokens, or a box cannot be used.
            UsageError: the model takes no boxes, or fewer.
        """
        try:
            ids, mask, _ = encode_phrases(self._processor, [text])
        except UsageError as error:
            raise PromptError("text", str(error)) from None
        prompts = {"input_ids": ids, "attention_mask": mask}
        if len(boxes):
            corners = np.array([self._box(box, f"boxes[{index}]") for index, box in enumerate(boxes)])
            height, width = self._picture_size()
            corners /= (width, height, width, height)
            centre, size = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
            prompts["input_boxes"] = np.concatenate([centre, size], axis=1).astype(np.float32)[None]
            prompts["input_boxes_labels"] = self._labels(labels, len(boxes))[None]
        outputs = self.model.find(self._features(), prompts)
        with stage("post"):
            return self._concept({name: array[0] for name, array in outputs.items()}, options)

    def predict_exemplars(
        self, boxes: Sequence, labels: Sequence[int] | None = None, options: PostProcess = PostProcess()
    ) -> Answer:
        """Everything that looks like what the boxes show, a concept; see `predict_text`."""
        if not len(boxes):
            raise PromptError("boxes", "empty; give at least one box")
        return self.predict_text(VISUAL_WORD, boxes, labels, options)

    def predict_box(self, box: Sequence[float], options: PostProcess = PostProcess(), **more) -> Answer:
        """The one object in a box, a visual prompt; further arguments as for `predict_points`."""
        return self.predict_points([], [], box=box, options=options, **more)

    def predict_points(
        self,
        points: Sequence = (),
        labels: Sequence[int] | None = None,
        box: Sequence[float] | None = None,
        multimask: bool | None = None,
        mask_input: np.ndarray | None = None,
        options: PostProcess = PostProcess(),
    ) -> Answer:
        """The one object that clicks point at, a visual prompt.

        Args:
            points: x, y in pixels. labels: 1 for this, 0 for not this; all 1 if not given.
            box: around the object, in pixels.
            multimask: three masks to choose from, or one; None: three for a single click and nothing else.
            mask_input: (A, A) logits of an earlier answer that the clicks correct.

        Raises:
            PromptError: neither point nor box, or one that cannot be used.
            UsageError: the model takes no clicks, or fewer.
        """
        height, width = self._picture_size()
        if not len(points) and box is None:
            raise PromptError("points", "neither a point nor a box; give one")
        places = [self._numbers(point, 2, f"points[{index}]") for index, point in enumerate(points)]
        for index, (x, y) in enumerate(places):
            if not (0 <= x <= width and 0 <= y <= height):
                raise PromptError(f"points[{index}]", f"{x:g}, {y:g} lies outside of the {width} x {height} picture")
        numbers = [value for place in places for value in place]
        if numbers and max(numbers) <= 1 and not all(value.is_integer() for value in numbers):
            raise PromptError("points[0]", f"{numbers[0]:g}, {numbers[1]:g} looks like fractions; write pixels")
        kinds = self._labels(labels, len(places)).tolist()
        if box is not None:
            corners = self._box(box, "box")
            places += [corners[:2], corners[2:]]
            kinds += [contract.TOP_LEFT, contract.BOTTOM_RIGHT]
        if mask_input is not None:
            mask_input, wanted = np.asarray(mask_input, np.float32), (self.model.shapes.mask_size,) * 2
            if mask_input.shape != wanted or not np.isfinite(mask_input).all():
                raise PromptError(
                    "mask_input", f"{mask_input.shape}; give {wanted} finite logits, one of Answer.logits"
                )
        if multimask is None:
            multimask = len(places) == 1 and mask_input is None
        side = self.model.shapes.image_size
        scaled = np.array(places, np.float64) * (side / width, side / height)
        features = self._click_features()
        outputs = self.model.click(
            features,
            scaled.astype(np.float32)[None],
            np.array(kinds, np.int64)[None],
            None if mask_input is None else mask_input[None, None],
            multimask,
        )
        with stage("post"):
            return self._visual({name: array[0] for name, array in outputs.items()}, options)

    def shown_to_model(self, image: Image.Image) -> Image.Image:
        """A picture as the model gets it: resized without keeping its proportions, its colours turned back."""
        settings = self._processor.image_processor
        mean, std = (
            np.array(values, np.float32)[:, None, None] for values in (settings.image_mean, settings.image_std)
        )
        pixels = (prepare(self._processor, image) * std + mean).clip(0, 1) * 255
        return Image.fromarray(pixels.round().astype(np.uint8).transpose(1, 2, 0))

    def forget(self, image_id: str) -> bool:
        """Drop a picture's features; were they kept?"""
        return self.cache.drop(image_id)

    def _picture_size(self) -> tuple[int, int]:
        if self.image_id is None:
            raise PromptError("image", "no picture yet; call set_image first")
        return self.size

    def _features(self) -> dict:
        self._picture_size()
        features = self.cache.get(self.image_id)
        if features is None:
            raise PromptError("image", "its features were dropped for others; call set_image again")
        return features

    def _click_features(self) -> dict:
        features = self._features()
        if "click_feat_0" not in features:
            features = features | self.model.encode_clicks(features)
            for name in contract.BACKBONE:  # has served its purpose
                features.pop(name, None)
            self.cache.put(self.image_id, features)
        return features

    @staticmethod
    def _numbers(values, count: int, where: str) -> list[float]:
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            raise PromptError(where, f"{values!r} is not {count} numbers") from None
        if len(numbers) != count or not all(map(math.isfinite, numbers)):
            raise PromptError(where, f"{values!r} is not {count} finite numbers")
        return numbers

    def _box(self, box, where: str) -> list[float]:
        x1, y1, x2, y2 = self._numbers(box, 4, where)
        height, width = self._picture_size()
        if not (x1 < x2 and y1 < y2):
            raise PromptError(
                where, f"{x1:g}, {y1:g}, {x2:g}, {y2:g} is empty; write x1, y1, x2, y2 with x1 < x2, y1 < y2"
            )
        if max(x2, y2) <= 1:
            raise PromptError(where, f"{x1:g}, {y1:g}, {x2:g}, {y2:g} looks like fractions; write pixels")
        if not (0 <= x1 and x2 <= width and 0 <= y1 and y2 <= height):
            text = f"{x1:g}, {y1:g}, {x2:g}, {y2:g} lies outside of the {width} x {height} picture"
            raise PromptError(where, text)
        return [x1, y1, x2, y2]

    @staticmethod
    def _labels(labels, count: int) -> np.ndarray:
        given = [1] * count if labels is None else list(labels)
        if len(given) != count:
            raise PromptError("labels", f"{len(given)} labels for {count} places; give one for each")
        for index, label in enumerate(given):
            if isinstance(label, bool) or label not in (0, 1):
                raise PromptError(f"labels[{index}]", f"{label!r}; 1 for what is meant, 0 for what is not")
        return np.array(given, np.int64)

    def _concept(self, outputs: dict[str, np.ndarray], options: PostProcess) -> Answer:
        scores = instance_scores(outputs["pred_logits"][None], outputs["presence_logits"][None])[0]
        kept = np.flatnonzero(scores > options.score_threshold)
        # The cap comes before masks are resized, which is what costs memory.
        kept = kept[np.argsort(-scores[kept], kind="stable")][: options.max_detections]
        height, width = self.size
        boxes = outputs["pred_boxes"][kept] * np.array([width, height, width, height], np.float32)
        instances = []
        for masks in resize_masks(outputs["pred_masks"][kept], self.size, options.mask_threshold):
            for mask in masks:
                index = len(instances)
                box = [float(value) for value in boxes[index]]
                instances.append(_instance(float(scores[kept[index]]), box, mask, options))
        presence = float(1 / (1 + np.exp(-np.float64(outputs["presence_logits"][0]))))
        return Answer("concept", instances, presence=presence)

    def _visual(self, outputs: dict[str, np.ndarray], options: PostProcess) -> Answer:
        import torch
        import torch.nn.functional as F

        instances = []
        for score, logits in zip(outputs["iou_scores"], outputs["pred_masks"]):
            # As Sam3TrackerProcessor.post_process_masks does it: logits are resized, not probabilities.
            low = torch.from_numpy(np.ascontiguousarray(logits))[None, None]
            resized = F.interpolate(low, self.size, mode="bilinear", align_corners=False)[0, 0]
            instances.append(_instance(float(score), None, (resized > options.click_threshold).numpy(), options))
        presence = float(1 / (1 + np.exp(-np.float64(outputs["object_score_logits"][0]))))
        return Answer("visual", instances, object_score=presence, logits=outputs["pred_masks"])


def _instance(score: float, box: list[float] | None, mask: np.ndarray, options: PostProcess) -> Instance:
    mask = clean_mask(mask, options.max_hole_area, options.max_island_area, options.opening, options.closing)
    return Instance(score, box_of(mask) if box is None else box, int(mask.sum()), encode_rle(mask))
