# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Odd pictures become RGB, broken ones are refused with a reason, and pixel_values are Sam3Processor's."""

import numpy as np
import pytest
from conftest import SHARED
from PIL import Image

from sam3_utils.images import PictureError, load_rgb, prepare

RED = (255, 0, 0)


def saved(tmp_path, image: Image.Image, name: str, **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


def corner(path) -> tuple[int, int, int]:
    return load_rgb(path).getpixel((0, 0))


def test_grey_one_bit_and_palette_pictures_become_rgb(tmp_path):
    assert corner(saved(tmp_path, Image.new("L", (5, 4), 77), "l.png")) == (77, 77, 77)
    assert corner(saved(tmp_path, Image.new("1", (5, 4), 1), "one.png")) == (255, 255, 255)
    assert corner(saved(tmp_path, Image.new("RGB", (5, 4), RED).convert("P"), "p.png")) == RED


def test_transparent_pixels_lie_over_white(tmp_path):
    assert corner(saved(tmp_path, Image.new("RGBA", (5, 4), (255, 0, 0, 0)), "rgba.png")) == (255, 255, 255)
    assert corner(saved(tmp_path, Image.new("LA", (5, 4), (0, 0)), "la.png")) == (255, 255, 255)
    palette = Image.new("P", (5, 4), 0)
    palette.putpalette([0, 0, 255] + [0] * 765)
    assert corner(saved(tmp_path, palette, "trns.png", transparency=0)) == (255, 255, 255)
    assert corner(saved(tmp_path, Image.new("RGBA", (5, 4), (255, 0, 0, 255)), "opaque.png")) == RED


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    image = Image.fromarray(np.full((4, 5), 0x8080, dtype=np.uint16))
    assert corner(saved(tmp_path, image, "16.png")) == (128, 128, 128)


def test_cmyk_jpeg_keeps_its_colour(tmp_path):
    path = saved(tmp_path, Image.new("RGB", (16, 16), RED).convert("CMYK"), "cmyk.jpg", quality=95)
    assert np.abs(np.array(corner(path)) - RED).max() <= 12


def test_exif_rotation_is_applied_unless_the_annotations_fit_the_stored_picture(tmp_path):
    image = Image.new("RGB", (6, 4), (0, 0, 0))
    image.putpixel((0, 0), RED)
    exif = Image.Exif()
    exif[0x0112] = 6  # the viewer turns it a quarter clockwise: the stored top left corner is shown top right
    path = saved(tmp_path, image, "exif.png", exif=exif)
    shown = load_rgb(path)
    assert shown.size == (4, 6) and shown.getpixel((3, 0)) == RED
    assert load_rgb(path, (6, 4)).getpixel((3, 0)) == RED
    assert load_rgb(path, (4, 6)).getpixel((0, 0)) == RED
    exif[0x0112] = 3  # half a turn: the size says nothing, and pycocotools draws over stored pixels
    path = saved(tmp_path, image, "half.png", exif=exif)
    assert load_rgb(path).getpixel((5, 3)) == RED and load_rgb(path, (4, 6)).getpixel((0, 0)) == RED


def test_a_picture_of_another_size_than_annotated_is_refused(tmp_path):
    path = saved(tmp_path, Image.new("RGB", (6, 4)), "small.png")
    with pytest.raises(PictureError, match="4 x 6 pixels, the annotations say 9 x 9"):
        load_rgb(path, (9, 9))


@pytest.mark.parametrize("kind", ("truncated", "text", "empty", "folder", "missing"))
def test_unreadable_pictures_are_refused_with_their_path(tmp_path, kind):
    path = tmp_path / f"{kind}.jpg"
    if kind == "truncated":
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[:900])
    elif kind == "text":
        path.write_text("not a picture")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(PictureError, match=path.name):
        load_rgb(path)


def test_a_picture_too_large_to_prepare_is_refused_before_decoding(tmp_path):
    path = saved(tmp_path, Image.new("1", (30000, 30000)), "bomb.png")
    with pytest.raises(PictureError, match="30000 x 30000 is over 200,000,000 pixels"):
        load_rgb(path)


def test_a_large_picture_within_the_limit_is_taken_without_warning(tmp_path, recwarn):
    assert load_rgb(saved(tmp_path, Image.new("1", (19000, 10000)), "large.png")).size == (19000, 10000)
    assert not recwarn.list


def test_floating_point_pixels_are_refused(tmp_path):
    path = saved(tmp_path, Image.fromarray(np.full((4, 5), 0.5, dtype=np.float32)), "float.tiff")
    with pytest.raises(PictureError, match="float.tiff: floating-point"):
        load_rgb(path)


@pytest.mark.parametrize("size", [(1, 400), (400, 1), (3, 3), (1, 1), (30, 200)])
def test_extreme_shapes_reach_the_model_s_size(processor, size):
    noise = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    pixel_values = prepare(processor, Image.fromarray(noise))
    assert pixel_values.shape == (3, 224, 224) and pixel_values.dtype == np.float32
    assert -1 <= pixel_values.min() <= pixel_values.max() <= 1


def test_pixel_values_are_those_of_the_processor_on_photographs(processor):
    pictures = sorted((SHARED / "data" / "coco2017" / "val2017").glob("*.jpg"))[:20]
    if not pictures:
        pytest.skip("the COCO sample pictures are not beside the repository")
    for path in pictures:
        expected = processor(images=Image.open(path).convert("RGB"), return_tensors="pt")["pixel_values"][0].numpy()
        assert np.array_equal(prepare(processor, load_rgb(path)), expected), path.name


def test_pixel_values_follow_the_published_recipe(processor):
    """On a picture of the model's own size nothing is resized: (x / 255 - 0.5) / 0.5 remains."""
    noise = np.random.default_rng(2).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    expected = (noise.transpose(2, 0, 1) / 255 - 0.5) / 0.5
    assert np.abs(prepare(processor, Image.fromarray(noise)) - expected).max() < 1e-6
