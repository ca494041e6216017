#!/usr/bin/env bash
# Run this machine's scaling studies under results/, which docs/scaling.md cites.
#   PACELINE_HOST=a-name-for-this-machine benchmarks/scaling.sh results/a-name-for-this-machine [FOLDER_OF_CIFAR10]
# PYTHON sets the interpreter. Takes about ten minutes on CPUs, and 25 more on a GPU with CIFAR-10. A second call
# resumes an interrupted study.
set -euo pipefail
out=${1:?the folder for the results}
cifar=${2:-}
python=${PYTHON:-python3}
mkdir -p "$out"

. "$(dirname "$0")/study.sh"

# A CNN with 4.7 M parameters on up to 8 cores, one thread per rank.
cnn=(--device cpu --threads 1 --channels 16,32 --hidden 1024)
counts=(--ranks 1,2 --iters 80)
[ "$(nproc)" -ge 8 ] && counts=(--ranks 1,2,4,8 --global-batch-size 128 --iters 40)
scale scale-ranks ranks "${cnn[@]}" --batch-size 8,32 "${counts[@]}"
scale scale-batch-cpu batch "${cnn[@]}" --batch-size 8,32,128,512
scale scale-large-batch-cpu large-batch --device cpu

if [ -n "$cifar" ]; then
  ranks=(--model resnet18 --data "cifar10:$cifar" --samples 4096)
  scale scale-ranks-resnet18-gloo ranks "${ranks[@]}" --device cpu --backend gloo --threads 4 --ranks 1,2,4 \
    --batch-size 32,128 --global-batch-size 128 --iters 8
  scale scale-ranks-resnet18-gloo-cuda ranks "${ranks[@]}" --device cuda --backend gloo --ranks 1,2,4 \
    --batch-size 32,128,512,1024 --global-batch-size 512 --iters 30
  resnet=(--model resnet18 --data "cifar10:$cifar" --device cuda --precision bf16)
  scale scale-batch batch "${resnet[@]}" --batch-size 32,128,512,2048,8192,32768,50000
  # Several at a time, because one at batch 128 waits for its CPU; nvidia-cuda-mps-control -d helps to share the GPU.
  # With the original pixels, this is the study results/h200-16-cores/scale-large-batch-original-pixels.
  scale scale-large-batch large-batch "${resnet[@]}" --base-batch-size 128 --global-batch-size 8192 --batch-size 512 \
    --recipes none,linear,linear+warmup,lars+warmup,grow,grow+smoothing --epochs 60 --updates 0 --at-once 6 --lr 0.1 \
    --weight-decay 0.0005
fi
