# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Drawn scenes for the tiny SAM3: coloured shapes on textured backgrounds, and the phrases that name them.

A phrase is `[size] [colour] shape`: "star", "red star", "small star", "small red star". Sizes are told by the
shape's radius against the picture's shorter side, with a gap between "small" and "large" so that none is ambiguous.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (41, 98, 255),
    "yellow": (247, 208, 44),
    "purple": (150, 60, 190),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
RADIUS_RANGES = {"small": (0.10, 0.13), "large": (0.18, 0.25)}  # of the picture's shorter side
SIZES = tuple(RADIUS_RANGES)
MAX_OBJECTS = 5
MIN_VISIBLE = 0.7  # an object that later ones cover more than this leaves is not drawn


@dataclass
class SceneObject:
    """One drawn object; `mask` is the visible part, (height, width) bool."""

    size: str
    colour: str
    shape: str
    mask: np.ndarray

    def matches(self, phrase: str) -> bool:
        """Whether every word of `phrase` names a property of this object."""
        return set(phrase.split()) <= {self.size, self.colour, self.shape}


def all_phrases() -> list[str]:
    """Every phrase of the grammar: one, two and three words, in a fixed order."""
    pairs = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    return [
        *SHAPES,
        *pairs,
        *(f"{size} {shape}" for size in SIZES for shape in SHAPES),
        *(f"{size} {pair}" for size in SIZES for pair in pairs),
    ]


def _polygon(shape: str, centre: np.ndarray, radius: float, angle: float) -> list[tuple[float, float]]:
    if shape == "circle":
        corners, radii = 64, np.ones(64)
    elif shape == "square":
        corners, radii = 4, np.ones(4)
    elif shape == "triangle":
        corners, radii = 3, np.ones(3)
    elif shape == "star":
        corners, radii = 10, np.where(np.arange(10) % 2, 0.42, 1.0)
    else:  # cross: twelve corners of a plus sign with arms 0.6 of the radius wide
        arm = 0.3
        plus = [(arm, 1), (arm, arm), (1, arm), (1, -arm), (arm, -arm), (arm, -1)]
        outline = np.array(plus + [(-x, -y) for x, y in plus]) * radius
        rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        return [tuple(point) for point in outline @ rotation.T + centre]
    # Squares stand on a side, triangles and stars on their base, when the angle is zero.
    start = -np.pi / 2 + (np.pi / 4 if shape == "square" else 0)
    theta = start + angle + np.arange(corners) * 2 * np.pi / corners
    outline = np.stack([np.cos(theta), np.sin(theta)], axis=1) * (radii * radius)[:, None]
    return [tuple(point) for point in outline + centre]


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A muted texture: coarse and fine noise, with stripes or a gradient on some; (height, width, 3) float32."""
    base = rng.uniform(70, 185) + rng.uniform(-18, 18, 3)
    coarse = Image.fromarray(rng.integers(0, 256, (rng.integers(3, 12), rng.integers(3, 12)), dtype=np.uint8))
    coarse = np.asarray(coarse.resize((width, height), Image.BILINEAR), dtype=np.float32)[..., None] - 128
    fine = rng.integers(-128, 128, (height, width, 1), dtype=np.int16).astype(np.float32)
    picture = base + coarse * rng.uniform(0.05, 0.3) + fine * rng.uniform(0.02, 0.12)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    kind = rng.integers(3)
    if kind == 0:
        angle, period = rng.uniform(0, np.pi), rng.uniform(8, 40)
        wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * 2 * np.pi / period)
        picture += wave[..., None] * rng.uniform(5, 25)
    elif kind == 1:
        picture += ((x / width - 0.5) * rng.uniform(-60, 60) + (y / height - 0.5) * rng.uniform(-60, 60))[..., None]
    return picture.astype(np.float32)


def draw_scene(rng: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, list[SceneObject]]:
    """Draw one scene of one to `MAX_OBJECTS` objects, some overlapping.

    Returns the picture, (height, width, 3) uint8, and its objects with their visible masks.
    """
    picture = _background(rng, height, width)
    colour_names = list(COLOURS)
    drawn = []
    for _ in range(rng.integers(1, MAX_OBJECTS + 1)):
        for _attempt in range(12):
            size, colour, shape = rng.choice(SIZES), rng.choice(colour_names), rng.choice(SHAPES)
            radius = rng.uniform(*RADIUS_RANGES[size]) * min(height, width)
            centre = rng.uniform((0.8 * radius, 0.8 * radius), (width - 0.8 * radius, height - 0.8 * radius))
            canvas = Image.new("1", (width, height))
            ImageDraw.Draw(canvas).polygon(_polygon(shape, centre, radius, rng.uniform(-0.35, 0.35)), fill=1)
            mask = np.array(canvas)
            # Every object must keep most of itself once the new one lies on top.
            if all((old.mask & ~mask).sum() >= MIN_VISIBLE * full for old, full in drawn):
                for old, _ in drawn:
                    old.mask &= ~mask
                drawn.append((SceneObject(str(size), str(colour), str(shape), mask), mask.sum()))
                shade = np.array(COLOURS[colour]) * rng.uniform(0.85, 1.1) + rng.uniform(-8, 8, 3)
                speckle = rng.integers(-128, 128, (height, width, 1), dtype=np.int16) * rng.uniform(0, 0.1)
                picture = np.where(mask[..., None], shade + speckle, picture)
                break
    return np.clip(picture, 0, 255).astype(np.uint8), [scene_object for scene_object, _ in drawn]


def _phrase_of(rng: np.random.Generator, size: str, colour: str, shape: str) -> str:
    words = [(shape,), (colour, shape), (size, shape), (size, colour, shape)]
    return " ".join(words[rng.choice(4, p=[0.25, 0.30, 0.15, 0.30])])


def choose_phrases(
    rng: np.random.Generator, objects: list[SceneObject], present: int, absent: int
) -> tuple[list[str], list[str]]:
    """Choose phrases that name something in the scene and phrases that name nothing in it.

    Three of four absent phrases are hard: a present object's phrase with exactly one word changed.
    Fewer than asked may come back when the scene has no more; none twice.
    """

    def is_present(phrase):
        return any(scene_object.matches(phrase) for scene_object in objects)

    wanted, unwanted = [], []
    for _ in range(40):
        some = objects[rng.integers(len(objects))]
        phrase = _phrase_of(rng, some.size, some.colour, some.shape)
        if len(wanted) < present and phrase not in wanted:
            wanted.append(phrase)
        words = {"size": some.size, "colour": some.colour, "shape": some.shape}
        options = {"size": SIZES, "colour": list(COLOURS), "shape": SHAPES}
        changed = list(words) if rng.random() < 0.25 else [rng.choice(list(words))]
        for key in changed:
            words[key] = str(rng.choice(options[key]))
        phrase = _phrase_of(rng, **words)
        if len(unwanted) < absent and phrase not in unwanted and not is_present(phrase):
            unwanted.append(phrase)
    return wanted, unwanted
