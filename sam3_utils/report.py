# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What people look at: versions, tables, overlay pictures."""

import platform
from importlib import metadata
from pathlib import Path

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


def overlay(
    picture: Image.Image, truth: np.ndarray, predicted: np.ndarray, caption: str, names=("annotated", "predicted")
) -> Image.Image:
    """The picture in grey three times: one mask in green, the other in blue, and where they differ in red.

    Args:
        truth, predicted: (height, width) bool masks; `names` is what they are called.
    """
    rgb = np.asarray(picture.convert("L").convert("RGB"), dtype=np.float32)

    def tinted(mask, colour):
        shade = rgb * 0.55
        shade[mask] = rgb[mask] * 0.4 + np.array(colour) * 0.6
        return shade

    panels = np.concatenate(
        [tinted(truth, (0, 200, 0)), tinted(predicted, (0, 120, 255)), tinted(truth ^ predicted, (230, 0, 0))], axis=1
    )
    canvas = Image.new("RGB", (panels.shape[1], panels.shape[0] + 16), (255, 255, 255))
    canvas.paste(Image.fromarray(panels.astype(np.uint8)), (0, 16))
    ImageDraw.Draw(canvas).text((4, 2), f"{caption} | {names[0]}, {names[1]}, difference", fill=(0, 0, 0))
    return canvas


def plot_sweep(path: Path, sweeps: dict[str, dict[float, dict]], iou_type: str) -> None:
    """cgF1, pmF1 and IL_MCC, averaged over the subsets, against the score threshold; thin lines are the subsets' cgF1.

    Args:
        sweeps: subset -> score threshold -> official metrics.
    """
    axes = _axes("score threshold", "value")
    levels = sorted(next(iter(sweeps.values())))
    for sweep in sweeps.values():
        axes.plot(levels, [sweep[level][f"cgF1_eval_{iou_type}_cgF1"] for level in levels], color="0.8", linewidth=0.8)
    for key, label in (("cgF1", "cgF1"), ("positive_micro_F1", "pmF1"), ("IL_MCC", "IL_MCC")):
        values = [[sweep[level][f"cgF1_eval_{iou_type}_{key}"] for level in levels] for sweep in sweeps.values()]
        axes.plot(levels, np.mean(values, axis=0), marker="o", markersize=3, label=label)
    axes.axvline(0.5, color="0.5", linestyle=":", linewidth=1)
    axes.set_title(f"mean of {len(sweeps)} subsets ({iou_type}); the benchmark counts scores from 0.5")
    _save(axes, path)


def plot_subsets(path: Path, metrics: dict[str, dict], iou_type: str, published: dict[str, float]) -> None:
    """cgF1 of each subset as bars, in percent, beside the published ones (masks only).

    Args:
        metrics: subset -> official metrics.
        published: subset -> cgF1 in percent.
    """
    axes = _axes("", "cgF1 (%)")
    position = np.arange(len(metrics))
    values = [100 * subset[f"cgF1_eval_{iou_type}_cgF1"] for subset in metrics.values()]
    bars = axes.bar(position - 0.2, values, 0.4, label="measured")
    axes.bar_label(bars, fmt="%.1f", fontsize=8)
    if iou_type == "segm":
        beside = [published[name] for name in metrics]
        axes.bar_label(axes.bar(position + 0.2, beside, 0.4, label="published (Meta)"), fmt="%.1f", fontsize=8)
    axes.set_xticks(position, list(metrics), rotation=20, ha="right")
    _save(axes, path)


def _axes(x_label: str, y_label: str):
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    axes = Figure(figsize=(9, 5), layout="constrained").subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", alpha=0.3)
    return axes


def _save(axes, path: Path) -> None:
    axes.margins(y=0.12)  # room for the legend above the curves and bars
    axes.legend(loc="upper right", ncols=3)
    axes.figure.savefig(path, dpi=110)
