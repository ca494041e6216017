#!/usr/bin/env bash
# Train and profile on a GPU, for the runs under results/ that docs/training.md and docs/profiling.md cite.
#   benchmarks/gpu_training.sh OUT [FOLDER_OF_CIFAR10]
# PYTHON sets the interpreter. Takes about ten minutes on one H200.
set -euo pipefail
out=${1:?the folder for the results}
cifar=${2:-}
python=${PYTHON:-python3}
mkdir -p "$out"

run() { # NAME VERB ARGUMENTS...: one run, its folder renamed to NAME; what is there already is kept
  local name=$1
  shift
  if [ -e "$out/$name" ]; then
    echo "$out/$name exists already: skipped"
    return
  fi
  "$python" -m paceline "$@" --out "$out/new"
  mv "$out"/new/* "$out/$name"
  rmdir "$out/new"
}

# Train a sentence-pair classifier before and after following the advice.
smol=(--model hf:HuggingFaceTB/SmolLM2-360M-Instruct --data synthetic:pairs --context 128 --optimizer adamw --ranks 1 --device cuda)
run smollm2-before profile trace "${smol[@]}" --batch-size 8 --precision fp32 --steps 5 --plot
run smollm2-bf16 profile trace "${smol[@]}" --batch-size 8 --precision bf16 --steps 5
run smollm2-bf16-batch-64 profile trace "${smol[@]}" --batch-size 64 --precision bf16 --steps 5
run smollm2-after profile trace "${smol[@]}" --batch-size 64 --precision bf16 --compile --steps 5 --plot
"$python" -m paceline profile --compare "$out/smollm2-before" "$out/smollm2-after" | tee "$out/smollm2-compare.txt"

run gpt2-large-phases profile phases --model gpt2-large --batch-size 4 --precision bf16 --ranks 1 --device cuda
run gpt2-large-layers profile layers --model gpt2-large --batch-size 4 --precision bf16 --device cuda
run gpt2-large-wrappers bench wrappers --model gpt2-large --backend nccl --ranks 1 --dtype bfloat16 --wrapper bare,torch,torch-tuned,paceline --iters 40
run phases-gloo-cuda profile phases --model resnet18 --batch-size 64 --ranks 2 --device cuda --backend gloo

if [ -n "$cifar" ]; then
  run cifar10-resnet18 train --model resnet18 --data "cifar10:$cifar" --ranks 1 --device cuda --precision bf16 --batch-size 512 --epochs 30 \
    --lr 0.4 --lr-warmup 490 --schedule linear --weight-decay 0.0005
  rm -rf "$out/cifar10-resnet18/checkpoints" "$out/cifar10-resnet18/weights.safetensors"
fi
