#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Words, boxes and clicks over HTTP, and a page to click on, on this machine.

Example:
    python3 sam3_serve.py --model_path ./sam3_model --state_dir ./sam3_state
    then open http://127.0.0.1:8000 (the API is described at /docs)

Every flag can be given by an environment variable: SAM3_MODEL_PATH, SAM3_DEVICE, SAM3_PORT and so on. SAM3_TOKEN, if
set, is what clients must send: Authorization: Bearer <token>.

Reads:  a model of any kind; for an .onnx, an .om or a split model also the processor files in --processor_path
Writes: <state_dir>: pictures, and sessions.sqlite3, from which a service started again goes on
Exit:   0 stopped, 2 wrong usage.
"""

import logging
import os
import sqlite3
from functools import partial
from pathlib import Path

from sam3_utils.cli import UsageError, add_dtype, make_parser, one_path, positive_int, run

logger = logging.getLogger("sam3_serve")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def port(text: str) -> int:
    """argparse type: a TCP port; 0 takes a free one."""
    if not 0 <= int(text) <= 65535:
        raise ValueError(text)
    return int(text)


def parse_args(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--model_path", nargs="+", help="an .onnx, an .om, a split model, or a checkpoint folder")
    parser.add_argument(
        "--processor_path", type=Path, help="folder of the processor and tokenizer files; not given: the checkpoint"
    )
    parser.add_argument(
        "--device", help='as in all scripts, "cuda:0,cuda:1" for a thread each; one NPU a service (cpu if not given)'
    )
    add_dtype(parser, "a checkpoint")
    parser.add_argument("--image_size", type=positive_int, help="side of the pictures, for a checkpoint")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 opens the service to the network; set SAM3_TOKEN")
    parser.add_argument("--port", type=port, default=8000)
    parser.add_argument("--state_dir", type=Path, default=Path("./sam3_state"), help="pictures and sessions")
    parser.add_argument("--cache_mb", type=positive_int, default=2000, help="of features kept for each device")
    parser.add_argument("--queue_size", type=positive_int, default=32, help="requests that may wait for each device")
    parser.add_argument("--max_mb", type=positive_int, default=50, help="largest picture file")
    parser.add_argument("--max_megapixels", type=positive_int, default=100, help="largest picture")
    parser.add_argument(
        "--roboflow_compat", action="store_true", help="also answer /sam3/embed_image, concept_segment, visual_segment"
    )
    for action in parser._actions:
        value = os.environ.get(f"SAM3_{action.dest.upper()}")
        if value is not None and action.dest not in ("help", "roboflow_compat"):
            action.default = [value] if action.nargs else value  # argparse converts strings by the flag's type
    return parser.parse_args(argv)


def warm_up(predictor) -> None:
    """One phrase, and one click where the model takes them, on a grey picture."""
    from PIL import Image

    predictor.set_image(Image.new("RGB", (64, 64), (128, 128, 128)))
    predictor.predict_text("object")
    if predictor.model.clicks != 0:
        predictor.predict_points([(32, 32)])
    predictor.forget(predictor.image_id)


def main(argv=None) -> int:
    args = parse_args(argv)
    if not args.model_path:
        raise UsageError("--model_path (or SAM3_MODEL_PATH) is missing: a checkpoint folder, an .onnx, an .om")
    try:
        import uvicorn

        from sam3_utils.service import Settings, create_app
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed: pip install -r requirements-serve.txt") from None
    from sam3_utils.backends import describe_model, fit_processor, is_om, open_model
    from sam3_utils.checkpoint import check_processor_files, load_processor
    from sam3_utils.devices import DeviceThread
    from sam3_utils.predictor import Predictor
    from sam3_utils.store import Store

    model_path = one_path(args.model_path, "--model_path")
    processor_path = args.processor_path or model_path
    check_processor_files(processor_path)
    devices = (args.device or ("0" if is_om(model_path) else "cpu")).replace(" ", "").split(",")
    if is_om(model_path) and len(devices) > 1:
        raise UsageError(f"--device {args.device}: an NPU wants a process of its own; start a service for each")
    described: dict = {}

    def make(device: str) -> Predictor:
        processor = load_processor(processor_path)
        model = open_model(model_path, device, args.dtype, args.image_size)
        fit_processor(processor, model, processor_path, model_path)
        described.update(describe_model(model_path, model.runtime, model.precision))
        return Predictor(model, processor, args.cache_mb * 1_000_000)

    token = os.environ.get("SAM3_TOKEN") or None
    if args.host not in LOOPBACK and token is None:
        logger.warning("--host %s: anybody who reaches this machine may use the service; set SAM3_TOKEN", args.host)
    try:
        store = Store(args.state_dir)
    except (OSError, sqlite3.Error) as error:
        raise UsageError(f"--state_dir {args.state_dir}: cannot be used ({error}); give another folder") from None
    described["name"] = model_path.resolve().name
    settings = Settings(
        described, args.max_mb * 1_000_000, args.max_megapixels * 1_000_000, token=token,
        # A page elsewhere must not reach a loopback service by a name of its own that points here.
        hosts=LOOPBACK if args.host in LOOPBACK else ("*",),
    )  # fmt: skip
    threads = [DeviceThread(partial(make, device), warm_up, args.queue_size) for device in devices]
    app = create_app(settings, store, threads, args.roboflow_compat)
    logger.info("http://%s:%d, model %s, state in %s", args.host, args.port, model_path, args.state_dir)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=30)
    return 0


if __name__ == "__main__":
    run(main)
