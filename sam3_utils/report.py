# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What people look at: versions, tables, overlay pictures."""

import platform
from importlib import metadata

import numpy as np
from PIL import Image, ImageDraw

PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "numpy",
    "onnx",
    "onnxruntime",
    "pillow",
    "pycocotools",
    "aclruntime",
)


def versions() -> dict[str, str]:
    """Versions of Python, the machine type and the installed packages that results depend on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def columns(cells: list[str], width: int = 100) -> str:
    """Short cells set in as many columns as fit, read downwards."""
    if not cells:
        return ""
    widest = max(map(len, cells)) + 3
    per_row = max(1, width // widest)
    rows = -(-len(cells) // per_row)
    lines = ("".join(cell.ljust(widest) for cell in cells[row::rows]).rstrip() for row in range(rows))
    return "\n".join(lines)


def overlay(picture: Image.Image, truth: np.ndarray, predicted: np.ndarray, caption: str) -> Image.Image:
    """The picture three times: annotated mask in green, predicted in blue, and where they differ in red.

    Args:
        truth, predicted: (height, width) bool masks.
    """
    rgb = np.asarray(picture, dtype=np.float32)

    def tinted(mask, colour):
        shade = rgb * 0.55
        shade[mask] = rgb[mask] * 0.4 + np.array(colour) * 0.6
        return shade

    panels = np.concatenate(
        [tinted(truth, (0, 200, 0)), tinted(predicted, (0, 120, 255)), tinted(truth ^ predicted, (230, 0, 0))], axis=1
    )
    canvas = Image.new("RGB", (panels.shape[1], panels.shape[0] + 16), (255, 255, 255))
    canvas.paste(Image.fromarray(panels.astype(np.uint8)), (0, 16))
    ImageDraw.Draw(canvas).text((4, 2), f"{caption} | annotated, predicted, difference", fill=(0, 0, 0))
    return canvas
