#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Words and a click through a running sam3_serve.py, with Python's own library alone.

python3 examples/client.py street.jpg "red car" 210 95 [http://127.0.0.1:8000]
"""

import base64
import json
import os
import sys
import urllib.request


def post(url: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json"}
    if "SAM3_TOKEN" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['SAM3_TOKEN']}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def main(path: str, phrase: str, x: str, y: str, server: str = "http://127.0.0.1:8000") -> None:
    with open(path, "rb") as file:
        image_id = post(f"{server}/v1/images", {"image": base64.b64encode(file.read()).decode()})["image_id"]
    words = post(f"{server}/v1/segment/text", {"image_id": image_id, "prompts": [phrase]})
    for instance in words["results"][0]["instances"]:
        print(f"{phrase}: score {instance['score']:.3f}, box {instance['box']}, {instance['area']} pixels")
    click = {"image_id": image_id, "points": [{"x": float(x), "y": float(y)}], "format": "png"}
    result = post(f"{server}/v1/segment/points", click)["results"][0]
    best = result["instances"][result["best"]]
    print(f"click: score {best['score']:.3f}, {best['area']} pixels, written to click.png")
    with open("click.png", "wb") as file:
        file.write(base64.b64decode(best["mask"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
