#!/usr/bin/env bash
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
# ONNX to OM with ATC, run in the folder that holds ./sam3_onnx_${TARGET_DEVICE}; results go to ./sam3_om.
#
#   source /usr/local/Ascend/ascend-toolkit/set_env.sh
#   export TARGET_DEVICE=300I BATCH_SIZE=4 SOC_VERSION=Ascend310P3
#   bash sam3_convert_om.sh            (--help lists the options; --dry_run only prints the command line)
#
# fusion_switch.cfg goes to ATC for every device but 300I. It turns off two graph fusions that replace attention by one
# operator made for plain BERT and ViT blocks, the two that ModelZoo's CLIP entry turns off as well: SAM3's text encoder
# is CLIP's, and its picture encoder rotates queries and keys (RoPE) inside the pattern. It must never hold
# "ALL": "off", which would take the LayerNorm, Gelu and Softmax fusions away too; that is a tool for a search only.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m sam3_utils.convert_om "$@"
