# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The predictor over HTTP: pictures, words, boxes, clicks and sessions that survive a restart. README lists the paths,
`/docs` and `/openapi.json` describe them."""

import base64
import hmac
import io
import json
import logging
import statistics
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, File, Form, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from PIL import Image
from prometheus_client import generate_latest
from pydantic import FiniteFloat
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from sam3_utils import results
from sam3_utils.cli import CheckFailed, UsageError
from sam3_utils.contract import TEXT_LENGTH
from sam3_utils.devices import Busy, DeviceThread, NotReady
from sam3_utils.engine import ApiError, Engine, Settings, decoded
from sam3_utils.images import decode_rgb
from sam3_utils.masks import polygons
from sam3_utils.predictor import PostProcess, PromptError
from sam3_utils.schemas import (
    BlogAnswer,
    Dropped,
    ErrorAnswer,
    ImageAnswer,
    ImageId,
    ImageSessions,
    MaskFormat,
    Picture,
    PointsRequest,
    SegmentAnswer,
    SessionAnswer,
    SessionChange,
    SessionId,
    StoredImage,
    TextRequest,
)
from sam3_utils.store import Store

logger = logging.getLogger(__name__)
WEB = Path(__file__).parent / "web"
JSON_ROOM = 64 * 1024  # of a body beside the picture in it
RETRY_SECONDS = 2


def limit_body(app, limit: int):
    """ASGI middleware: a body of over `limit` bytes is refused as soon as that is known, with Content-Length or not."""
    fault = {"code": "too_large", "message": f"the body is over {limit} bytes", "field": None}
    refusal = JSONResponse({"error": fault}, 413, {"Connection": "close"})

    async def limited(scope, receive, send):
        if scope["type"] != "http":
            return await app(scope, receive, send)
        seen, refused = 0, False

        async def counted():
            nonlocal seen, refused
            message = await receive()
            seen += len(message.get("body", b""))
            if seen <= limit or refused:
                return message
            refused = True
            await refusal(scope, receive, send)
            return {"type": "http.disconnect"}

        async def unless_refused(message):
            if not refused:
                await send(message)

        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            return await refusal(scope, receive, send)
        try:
            await app(scope, counted, unless_refused)
        except Exception:
            if not refused:  # the app complains of a client that has gone
                raise

    return limited


def create_app(settings: Settings, store: Store, threads: list[DeviceThread], roboflow_compat: bool = False) -> FastAPI:
    """The service; `threads` are started with it and stopped with it. `roboflow_compat` adds the paths of `roboflow`.

    Requests are answered in FastAPI's own threads, which wait for a device thread.
    """
    engine = Engine(settings, store, threads)
    bearer = HTTPBearer(auto_error=False)

    @asynccontextmanager
    async def lifespan(app):
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.stop()
        store.close()

    def authorised(given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        if settings.token is None:
            return
        if given is None or not hmac.compare_digest(given.credentials.encode(), settings.token.encode()):
            raise ApiError(401, "unauthorised", "this service wants its token: Authorization: Bearer <token>")

    app = FastAPI(
        title="SAM3", version="1", lifespan=lifespan, description=__doc__,
        responses={"default": {"model": ErrorAnswer, "description": "error"}},
    )  # fmt: skip
    api = APIRouter(dependencies=[Depends(authorised)])

    def picture_of(body: Picture) -> dict:
        if (body.image_id is None) == (body.image is None):
            raise ApiError(422, "bad_prompt", "give one of image_id and image", "image_id")
        return engine.known_image(body.image_id) if body.image_id else engine.keep_image(decoded(body.image), "picture")

    image_body = {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object", "required": ["file"],
                        "properties": {"file": {"type": "string", "format": "binary"}},
                    }
                },
                "application/json": {
                    "schema": {
                        "type": "object", "required": ["image"],
                        "properties": {"image": {"type": "string", "description": "base64 or a data URI"},
                                       "name": {"type": "string"}},
                    }
                },
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        }
    }  # fmt: skip

    async def sent_image(request: Request) -> tuple[bytes, str]:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind == "multipart/form-data":
            form = await request.form()
            file = form.get("file")
            if file is None or isinstance(file, str):
                raise ApiError(422, "bad_prompt", "a file is wanted here", "file")
            return await file.read(), file.filename or "picture"
        if kind == "application/json":
            try:
                body = json.loads(await request.body())
            except ValueError as error:
                raise ApiError(400, "bad_json", str(error)) from None
            if not isinstance(body, dict) or not isinstance(body.get("image"), str):
                raise ApiError(422, "bad_prompt", "base64 is wanted here", "image")
            return decoded(body["image"]), str(body.get("name", "picture"))
        if kind in ("application/octet-stream", "") or kind.startswith("image/"):
            return await request.body(), "picture"
        raise ApiError(415, "unsupported_media_type", f"{kind}: send image/*, multipart/form-data or application/json")

    SentImage = Annotated[tuple, Depends(sent_image)]

    @api.post("/v1/images", response_model=ImageAnswer, openapi_extra=image_body, tags=["pictures"])
    def add_image(sent: SentImage):
        """Keep a picture and encode it. The same bytes have the same id."""
        stored, timings = engine.keep_image(*sent), {}
        engine.on_device(stored["image_id"], lambda predictor: engine.take_picture(predictor, stored, timings))
        return stored | {"cached": not timings["encode"], "encode_ms": timings["encode"]}

    @api.get("/v1/images", response_model=list[StoredImage], tags=["pictures"])
    def list_images():
        """All pictures, the newest first."""
        return store.images()

    @api.get("/v1/images/{image_id}", response_model=ImageSessions, tags=["pictures"])
    def get_image(image_id: ImageId, format: MaskFormat = "rle"):
        """A picture and its sessions."""
        stored = engine.known_image(image_id)
        return stored | {"sessions": [session_answer(one, format) for one in store.sessions(image_id)]}

    @api.get("/v1/images/{image_id}/file", response_class=Response, tags=["pictures"])
    def get_file(image_id: ImageId):
        """The picture as a PNG, turned as its EXIF orientation says: what coordinates speak of."""
        engine.known_image(image_id)
        buffer = io.BytesIO()
        decode_rgb(store.image_file(image_id)).save(buffer, "PNG", compress_level=1)
        return Response(buffer.getvalue(), media_type="image/png")

    @api.delete("/v1/images/{image_id}", response_model=Dropped, tags=["pictures"])
    def delete_image(image_id: ImageId):
        """Drop a picture, its features and its sessions."""
        engine.known_image(image_id)
        engine.on_device(image_id, lambda predictor: predictor.forget(image_id))
        return {"dropped": store.delete_image(image_id)}

    # Prompts

    def shaped(record: dict, format: str, session_id: str | None = None) -> dict:
        """A record of `results.as_json` as an answer has it."""
        instances = []
        for instance in record["instances"]:
            mask = {"mask": instance["mask"]}
            if format == "png":
                mask["mask"] = _png(results.mask_of(instance))
            elif format == "polygon":
                outlines, kept = polygons(results.mask_of(instance))
                mask = {"mask": [outline.round(2).ravel().tolist() for outline in outlines], "polygon_iou": kept}
            instances.append({"score": instance["score"], "box": instance["box_xyxy"], "area": instance["area"]} | mask)
        return record | {"instances": instances, "session_id": session_id}

    def answer(stored: dict, found: list[dict], timings: dict) -> dict:
        size = {"width": stored["width"], "height": stored["height"]}
        model = settings.model["name"]
        return {"image_id": stored["image_id"], **size, "model": model, "results": found, "timings_ms": timings}

    @api.post("/v1/segment/text", response_model=SegmentAnswer, tags=["segment"])
    def segment_text(body: TextRequest):
        """Everything that each phrase names, a concept; exemplars show what is meant. Nothing found: an empty list."""
        if not body.prompts and not body.exemplars:
            raise ApiError(422, "bad_prompt", "give prompts, or exemplars", "prompts")
        started, timings = time.perf_counter(), {}
        stored = picture_of(body)
        timings["decode"] = round((time.perf_counter() - started) * 1000, 2)
        options = replace(
            PostProcess(), score_threshold=body.score_threshold, mask_threshold=body.mask_threshold,
            max_detections=body.max_detections,
        )  # fmt: skip
        boxes, labels = [one.box for one in body.exemplars], [one.label for one in body.exemplars]
        shown = {"exemplars": boxes, "labels": labels} if boxes else {}

        def work(predictor):
            engine.take_picture(predictor, stored, timings)
            begun, records = time.perf_counter(), []
            for index, text in enumerate(body.prompts):
                try:
                    records.append(
                        results.as_json(predictor.predict_text(text, boxes, labels, options), {"text": text} | shown)
                    )
                except PromptError as error:
                    field = f"prompts[{index}]" if error.field == "text" else error.field.replace("boxes", "exemplars")
                    raise ApiError(422, "bad_prompt", str(error), field) from None
            if not body.prompts:
                records.append(results.as_json(predictor.predict_exemplars(boxes, labels, options), shown))
            engine.timed(stored["image_id"], timings, "predict_text", begun)
            ids = [None] * len(records)
            if body.save:
                ids = [store.add_step(None, stored["image_id"], one["prompt"], one, None) for one in records]
            return [shaped(one, body.format, session_id) for one, session_id in zip(records, ids)]

        return answer(stored, engine.on_device(stored["image_id"], work), timings)

    @api.post("/v1/segment/points", response_model=SegmentAnswer, tags=["segment"])
    def segment_points(body: PointsRequest):
        """The one object that clicks and a box point at (a visual prompt). With session_id the points are added to the
        session's, and its last mask is corrected by them."""
        started, timings = time.perf_counter(), {}
        stored = picture_of(body)
        timings["decode"] = round((time.perf_counter() - started) * 1000, 2)

        def work(predictor):
            before, earlier = {}, None
            if body.session_id is not None:
                session = known_session(body.session_id)
                if session["image_id"] != stored["image_id"] or session["kind"] != "visual":
                    raise ApiError(422, "bad_prompt", "a session of another picture, or of words", "session_id")
                if not body.reset and session["prompt"]:
                    before, earlier = session["prompt"], store.logits(body.session_id)
            points = [*before.get("points", []), *([point.x, point.y] for point in body.points)]
            labels = [*before.get("labels", []), *(point.label for point in body.points)]
            box = body.box or before.get("box")
            engine.take_picture(predictor, stored, timings)
            begun = time.perf_counter()
            found = predictor.predict_points(points, labels, box, body.multimask, earlier)
            engine.timed(stored["image_id"], timings, "predict_points", begun)
            prompt = ({"points": points, "labels": labels} if points else {}) | ({"box": box} if box else {})
            record, session_id = results.as_json(found, prompt), body.session_id
            if body.save:
                session_id = store.add_step(
                    session_id, stored["image_id"], prompt, record, found.logits, anew=body.reset
                )
            return [shaped(record, body.format, session_id)]

        return answer(stored, engine.on_device(stored["image_id"], work), timings)

    @api.post("/segment", response_model=BlogAnswer, tags=["segment"])
    def segment(
        file: Annotated[UploadFile, File()],
        x: Annotated[FiniteFloat | None, Form()] = None,
        y: Annotated[FiniteFloat | None, Form()] = None,
        query_x: Annotated[FiniteFloat | None, Query(alias="x")] = None,
        query_y: Annotated[FiniteFloat | None, Query(alias="y")] = None,
    ):
        """One click on one picture, in one call: `file`, and `x` and `y` as form fields or in the query."""
        x, y = (query_x if x is None else x), (query_y if y is None else y)
        for name, value in (("x", x), ("y", y)):
            if value is None:
                raise ApiError(422, "bad_prompt", "missing", name)
        stored, timings = engine.keep_image(file.file.read(), file.filename or "picture"), {}

        def work(predictor):
            engine.take_picture(predictor, stored, timings)
            return predictor.predict_points([[x, y]]).best

        best = engine.on_device(stored["image_id"], work)
        return {"mask_base64": _png(best.mask), "score": best.score}

    # Sessions

    def known_session(session_id: str) -> dict:
        session = store.session(session_id)
        if session is None:
            raise ApiError(404, "unknown_session", "never seen here, or deleted", "session_id")
        return session

    def session_answer(session: dict, format: str) -> dict:
        result = session["result"] and shaped(session["result"], format, session["session_id"])
        return session | {"result": result}

    @api.get("/v1/sessions/{session_id}", response_model=SessionAnswer, tags=["sessions"])
    def get_session(session_id: SessionId, format: MaskFormat = "rle"):
        """A session's prompts and last answer."""
        return session_answer(known_session(session_id), format)

    @api.patch("/v1/sessions/{session_id}", response_model=SessionAnswer, tags=["sessions"])
    def change_session(session_id: SessionId, body: SessionChange):
        """Choose another of the last answer's masks, or give the object a name."""
        session = known_session(session_id)
        if body.best is not None:
            count = len(session["result"]["instances"]) if session["result"] else 0
            if session["kind"] != "visual" or body.best >= count:
                raise ApiError(422, "bad_prompt", f"the last answer has {count} masks to choose from", "best")
            store.choose(session_id, body.best)
        if body.name is not None:
            store.rename(session_id, body.name)
        return session_answer(known_session(session_id), "rle")

    @api.post("/v1/sessions/{session_id}/undo", response_model=SessionAnswer, tags=["sessions"])
    def undo(session_id: SessionId):
        """Drop a session's last step."""
        known_session(session_id)
        store.undo(session_id)
        return session_answer(known_session(session_id), "rle")

    @api.delete("/v1/sessions/{session_id}", response_model=Dropped, tags=["sessions"])
    def delete_session(session_id: SessionId):
        """Drop a session."""
        known_session(session_id)
        return {"dropped": store.delete_session(session_id)}

    # Export

    def exported(image_id: str) -> tuple[dict, list[dict]]:
        stored = engine.known_image(image_id)
        records = []
        for session in store.sessions(image_id):
            if session["result"]:
                prompt = session["prompt"] | {"name": session["name"]}
                records.append(session["result"] | {"prompt": prompt})
        return stored, records

    @api.get("/v1/images/{image_id}/coco.json", tags=["export"])
    def export_coco(image_id: ImageId) -> dict:
        """All objects of a picture as a COCO file."""
        stored, records = exported(image_id)
        image = {"path": stored["name"], "width": stored["width"], "height": stored["height"]}
        return results.coco([{"image": image, "results": records}])

    @api.get("/v1/images/{image_id}/labelme.json", tags=["export"])
    def export_labelme(image_id: ImageId, tolerance: Annotated[float, Query(ge=0, le=100)] = 1.0) -> dict:
        """All objects of a picture as labelme has them: polygons."""
        stored, records = exported(image_id)
        return results.labelme(stored["name"], (stored["height"], stored["width"]), records, tolerance)

    @api.get("/v1/images/{image_id}/labels.png", response_class=Response, tags=["export"])
    def export_png(image_id: ImageId):
        """A 16-bit PNG of object numbers, 0 where nothing is; where objects overlap, the later one."""
        stored, records = exported(image_id)
        canvas, number = np.zeros((stored["height"], stored["width"]), np.uint16), 0
        for record in records:
            for instance in results.chosen(record):
                number += 1
                canvas[results.mask_of(instance)] = number
        buffer = io.BytesIO()
        Image.fromarray(canvas).save(buffer, "PNG")
        return Response(buffer.getvalue(), media_type="image/png")

    # About the service

    @app.get("/healthz", tags=["service"])
    def healthz() -> dict:
        """Is the process alive?"""
        return {"status": "ok"}

    @app.get("/readyz", tags=["service"])
    def readyz():
        """200 when every device has its model and has answered once; 503 before."""
        states = [thread.state for thread in threads]
        if all(state == "ready" for state in states):
            return {"state": "ready"}
        failed = [str(thread.error) for thread in threads if thread.error]
        state = {"state": "failed" if failed else "loading", "errors": failed}
        return JSONResponse(state, 503, {"Retry-After": str(RETRY_SECONDS)})

    @api.get("/v1/models", tags=["service"])
    def models() -> list[dict]:
        """The model, what it runs on, which prompts it takes, and the limits."""
        predictor = threads[0].predictor
        model = predictor.model if predictor else None
        # None means any number; a model without clicks or boxes says 0.
        prompts = ["text", *(["exemplar"] if model and model.exemplars != 0 else []),
                   *(["box", "point"] if model and model.clicks != 0 else [])]  # fmt: skip
        limits = {
            "bytes": settings.max_bytes, "pixels": settings.max_pixels, "tokens": TEXT_LENGTH,
            "points": model.clicks if model else None, "exemplars": model.exemplars if model else None,
        }  # fmt: skip
        devices = [thread.predictor.model.device for thread in threads if thread.predictor]
        return [settings.model | {"devices": devices, "prompts": prompts, "limits": limits}]

    @api.get("/v1/stats", tags=["service"])
    def stats() -> dict:
        """Caches, queues and times of each device."""
        return {"devices": [_device_stats(thread) for thread in threads], "pictures": len(store.images())}

    @api.get("/metrics", response_class=Response, tags=["service"])
    def prometheus():
        """The same for Prometheus."""
        return Response(generate_latest(engine.registry), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    def page():
        return FileResponse(WEB / "index.html")

    if roboflow_compat:
        from sam3_utils.roboflow import add_paths

        add_paths(api, engine)
    app.include_router(api)
    app.mount("/static", StaticFiles(directory=WEB), name="static")
    _handle_errors(app)

    @app.middleware("http")
    async def count(request: Request, call_next):
        response = await call_next(request)
        route = request.scope.get("route")
        path = getattr(route, "path", "other")
        engine.requests.labels(path, response.status_code).inc()
        return response

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts))
    app.add_middleware(limit_body, limit=settings.max_bytes * 4 // 3 + JSON_ROOM)
    return app


def _png(mask: np.ndarray) -> str:
    """A mask as a PNG of 0 and 255, in base64."""
    buffer = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8) * 255).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _device_stats(thread: DeviceThread) -> dict:
    found = {"state": thread.state, "waiting": thread.waiting(), "timings_ms": {}}
    if thread.predictor:
        cache = thread.predictor.cache
        names = ("bytes", "max_bytes", "hits", "misses", "evictions")
        found["cache"] = {name: getattr(cache, name) for name in names} | {"pictures": len(cache)}
    for stage, times in list(thread.times.items()):
        values = sorted(times)
        p95 = values[min(len(values) - 1, int(0.95 * len(values)))]
        found["timings_ms"][stage] = {"count": len(values), "p50": statistics.median(values), "p95": p95}
    return found


def _fault(status: int, code: str, message: str, field: str | None = None, headers: dict | None = None):
    return JSONResponse({"error": {"code": code, "message": message, "field": field}}, status, headers)


def _handle_errors(app: FastAPI) -> None:
    """Every error as `ErrorAnswer`."""

    @app.exception_handler(ApiError)
    def api_error(request, error):
        headers = {"Retry-After": str(RETRY_SECONDS)} if error.status == 503 else None
        if error.status == 401:
            headers = {"WWW-Authenticate": "Bearer"}
        return _fault(error.status, error.code, str(error), error.field, headers)

    @app.exception_handler(PromptError)
    def prompt_error(request, error):
        return _fault(422, "bad_prompt", str(error), error.field)

    @app.exception_handler(UsageError)
    def usage_error(request, error):
        return _fault(409, "model_lacks_prompt", str(error))

    @app.exception_handler(Busy)
    def busy(request, error):
        return _fault(503, "busy", str(error), headers={"Retry-After": str(RETRY_SECONDS)})

    @app.exception_handler(NotReady)
    def not_ready(request, error):
        return _fault(503, "loading", str(error), headers={"Retry-After": str(RETRY_SECONDS)})

    @app.exception_handler(RequestValidationError)
    def invalid(request, error):
        first = error.errors()[0]
        place = [part for part in first["loc"] if part not in ("body", "query", "path")]
        if first["type"] == "json_invalid":
            return _fault(400, "bad_json", f"not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
        return _fault(422, "bad_prompt", first["msg"], field or None)

    @app.exception_handler(StarletteHTTPException)
    def http_error(request, error):
        codes = {404: "not_found", 405: "method_not_allowed", 400: "bad_request"}
        code = codes.get(error.status_code, "http_error")
        return _fault(error.status_code, code, str(error.detail), headers=error.headers)

    @app.exception_handler(Exception)
    def internal(request, error):
        number = uuid.uuid4().hex[:12]
        logger.error("request %s failed: %s %s", number, request.method, request.url.path, exc_info=error)
        text = str(error) if isinstance(error, CheckFailed) else "see the log"
        return _fault(500, "internal", f"request {number}: {text}")
