#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Click on a picture, or type words, in a Gradio page (pip install gradio): gradio_demo.py ./sam3_model"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sam3_utils.backends import open_model
from sam3_utils.checkpoint import load_processor
from sam3_utils.predictor import Predictor


def sections(predictor: Predictor, picture, text: str, clicked=None):
    """What gradio's AnnotatedImage shows: the picture, and (mask, label) of each object."""
    predictor.set_image(picture)
    answer = predictor.predict_points([clicked]) if clicked else predictor.predict_text(text)
    found = [answer.best] if clicked else answer.instances
    return picture, [(one.mask, f"{text or 'object'} {one.score:.2f}") for one in found]


def main(folder: str) -> None:
    import gradio

    predictor = Predictor(open_model(Path(folder)), load_processor(Path(folder)))

    def clicked(image, event: gradio.SelectData):
        return sections(predictor, image, "", event.index)

    with gradio.Blocks(title="SAM3") as page:
        picture, text, shown = gradio.Image(type="numpy"), gradio.Textbox(label="words"), gradio.AnnotatedImage()
        text.submit(lambda image, words: sections(predictor, image, words), [picture, text], shown)
        picture.select(clicked, picture, shown)
    page.launch(server_name="127.0.0.1")


if __name__ == "__main__":
    main(*sys.argv[1:])
