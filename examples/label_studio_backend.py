#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""A Label Studio ML backend: clicks and boxes there become masks.

python3 examples/label_studio_backend.py ./sam3_model [ROOT of local files] [port, 9090]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import uvicorn
from fastapi import FastAPI, HTTPException

from sam3_utils import label_studio
from sam3_utils.backends import open_model
from sam3_utils.checkpoint import load_processor
from sam3_utils.predictor import Predictor


def main(folder: str, root: str | None = None, port: str = "9090") -> None:
    predictor = Predictor(open_model(Path(folder)), load_processor(Path(folder)))
    app, place = FastAPI(), root and Path(root)
    app.get("/health")(lambda: {"status": "UP"})
    app.post("/setup")(lambda: {"model_version": label_studio.VERSION})

    @app.post("/predict")
    async def predict(request: dict) -> dict:  # async: one after another, the predictor is for one thread
        try:
            return label_studio.answer(predictor, request, place)
        except Exception as error:
            raise HTTPException(422, str(error)) from None

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
