#!/usr/bin/env bash
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
# The whole chain on the tiny checkpoint, without weights or hardware: environment, demo pictures, ONNX export with its
# check against PyTorch, Mean IoU through PyTorch and through ONNX Runtime. Results go to demo_output/.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$root/sam3_utils/environment.sh"
use_environment "$root" requirements.txt
tiny="$root/assets/tiny_sam3"
out="$root/demo_output"

"$VENV_PYTHON" "$tiny/make_demo_data.py" --output_dir "$out/coco2017"
"$VENV_PYTHON" "$root/sam3_export_onnx.py" --target_device 300I --model_path "$tiny" --output_dir "$out/sam3_onnx_300I"
for model in "$tiny" "$out/sam3_onnx_300I/sam3.onnx"; do
    runtime=torch
    [ -d "$model" ] || runtime=onnx
    "$VENV_PYTHON" "$root/sam3_coco_iou_eval.py" --model_path "$model" --processor_path "$tiny" \
        --coco_root "$out/coco2017" --batch_size 8 --output_dir "$out/coco_iou_$runtime" --overlays 4 --overwrite
done
"$VENV_PYTHON" - "$out" <<'PY'
import json, sys
torch, onnx = (json.load(open(f"{sys.argv[1]}/coco_iou_{name}/summary.json"))["value"] for name in ("torch", "onnx"))
print(f"difference: {abs(torch - onnx):.1e}; look at {sys.argv[1]}/coco_iou_onnx/overlays")
sys.exit(abs(torch - onnx) > 1e-4)
PY
