# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The JSON that the service takes and gives."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

ImageId = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="hex SHA-256 of the picture's bytes")]
SessionId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
MaskFormat = Literal["rle", "polygon", "png"]


class Body(BaseModel):
    """A request's JSON; unknown keys are refused, since a misspelt one would silently do nothing."""

    model_config = ConfigDict(extra="forbid")


class Point(Body):
    x: FiniteFloat
    y: FiniteFloat
    label: Literal[0, 1] = 1


Box = Annotated[list[FiniteFloat], Field(min_length=4, max_length=4, description="x1, y1, x2, y2 in pixels")]


class Exemplar(Body):
    box: Box
    label: Literal[0, 1] = 1


class Picture(Body):
    """Which picture: one that was sent before, or its bytes in base64 (a data URI is understood)."""

    image_id: ImageId | None = None
    image: str | None = Field(None, min_length=1)
    format: MaskFormat = "rle"
    save: bool = Field(True, description="keep prompt and answer as a session")


class TextRequest(Picture):
    prompts: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field([], max_length=32)
    exemplars: list[Exemplar] = Field([], max_length=64)
    score_threshold: float = Field(0.5, ge=0, le=1)
    mask_threshold: float = Field(0.5, ge=0, le=1)
    max_detections: int = Field(100, ge=1, le=1000)


class PointsRequest(Picture):
    points: list[Point] = Field([], max_length=256)
    box: Box | None = None
    multimask: bool | None = Field(None, description="null: three masks for a single click, one otherwise")
    session_id: SessionId | None = Field(None, description="goes on with this session: its points, its last mask")
    reset: bool = Field(False, description="forget the session's earlier points")


class SessionChange(Body):
    best: int | None = Field(None, ge=0, le=2, description="which of the last answer's masks is meant")
    name: str | None = Field(None, max_length=200)


class Fault(BaseModel):
    code: str
    message: str
    field: str | None = None


class ErrorAnswer(BaseModel):
    error: Fault


class ImageAnswer(BaseModel):
    image_id: str
    width: int
    height: int
    name: str
    cached: bool
    encode_ms: float


class StoredImage(BaseModel):
    image_id: str
    name: str
    width: int
    height: int


class Mask(BaseModel):
    score: float
    box: list[float] | None
    area: int
    mask: dict | list | str = Field(description="rle: {size, counts}; polygon: a list of outlines; png: base64")
    polygon_iou: float | None = Field(None, description="what polygons keep of the mask: they have no holes")


class Result(BaseModel):
    kind: Literal["concept", "visual"]
    prompt: dict
    session_id: str | None = None
    presence: float | None = None
    object_score: float | None = None
    best: int | None = None
    instances: list[Mask]


class SegmentAnswer(BaseModel):
    image_id: str
    width: int
    height: int
    model: str
    results: list[Result]
    timings_ms: dict[str, float]


class SessionAnswer(BaseModel):
    session_id: str
    image_id: str
    kind: Literal["concept", "visual"]
    name: str
    steps: int
    result: Result | None


class ImageSessions(StoredImage):
    sessions: list[SessionAnswer]


class BlogAnswer(BaseModel):
    mask_base64: str
    score: float


class Dropped(BaseModel):
    dropped: bool
