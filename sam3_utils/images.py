# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Picture files to RGB and to the model's pixel_values."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Image.MAX_IMAGE_PIXELS = None  # the limit below is the kit's own, and an error for that picture alone
MAX_PIXELS = 200_000_000  # a picture beyond this needs over 2 GB on its way to the model


class PictureError(Exception):
    """One picture cannot be used; the text says why. The run goes on without it."""


def load_rgb(path: Path, size: tuple[int, int] | None = None) -> Image.Image:
    """Decode a picture file; see `decode_rgb`. Its errors name the file."""
    try:
        if not path.is_file():
            raise PictureError("no such file")
        return decode_rgb(path, size)
    except PictureError as error:
        raise PictureError(f"{path}: {error}") from None


def decode_rgb(source: Path | bytes, size: tuple[int, int] | None = None) -> Image.Image:
    """Decode a picture to 8-bit RGB, turned as its EXIF orientation says.

    Transparent pixels lie over white; 16-bit grey is scaled; palettes, CMYK, grey and 1-bit are converted.

    Args:
        source: a file, or its bytes.
        size: (height, width) that the annotations speak of. When the picture as stored has that size, its
            orientation tag is left aside: pycocotools' masks are drawn over stored pixels.

    Raises:
        PictureError: not a picture, truncated, too large, or not of `size`.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > MAX_PIXELS:
                raise PictureError(f"{image.width} x {image.height} is over {MAX_PIXELS:,} pixels")
            stored = image.height, image.width
            image.load()
            rgb = _to_rgb(image.copy() if stored == size else ImageOps.exif_transpose(image))
    except PictureError:
        raise
    except UnidentifiedImageError:
        raise PictureError("cannot be decoded: no picture of a known format") from None
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and others
        raise PictureError(f"cannot be decoded ({type(error).__name__}: {error})") from None
    if size is not None and (rgb.height, rgb.width) != size:
        raise PictureError(f"{rgb.height} x {rgb.width} pixels, the annotations say {size[0]} x {size[1]}")
    return rgb


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise PictureError("floating-point pixels have no known range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image, dtype=np.float32)
        if image.mode != "I" or values.max() > 255:  # PNG's 16 bits come as I;16 or as I
            values = values / 257
        return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def prepare(processor, image: Image.Image) -> np.ndarray:
    """`Sam3Processor`'s own pixel_values of an RGB picture: (3, S, S) float32.

    Resized without keeping the aspect ratio, scaled to -1..1; the processor's file says how.
    """
    return processor.image_processor(images=image, return_tensors="pt")["pixel_values"][0].numpy()
