#!/usr/bin/env bash
# Measure this machine's runs under results/ that docs/strategies.md cites.
#   PACELINE_HOST=a-name-for-this-machine benchmarks/strategies.sh results/a-name-for-this-machine [CIFAR10 [TEXT]]
# PYTHON sets the interpreter. Without data, measures steps on two ranks and over links in about an hour (quiet machine,
# root, `ip` and `tc`). With a CIFAR-10 folder and a text file, measures accuracy on a GPU in about two hours, with
# nvidia-cuda-mps-control -d. A second call resumes interrupted runs.
set -euo pipefail
out=${1:?the folder for the results}
cifar=${2:-}
text=${3:-}
python=${PYTHON:-python3}
here=$(dirname "$0")
mkdir -p "$out"
. "$here/study.sh"

if [ -z "$cifar" ]; then
  "$python" "$here/validate_strategies.py" "$out/strategies" --keep
  "$python" "$here/two_ways.py" bf16
  exit
fi

resnet=(--model resnet18 --data "cifar10:$cifar" --device cuda --precision bf16 --epochs 30 --weight-decay 0.0005
  --workers 4 --seeds 5 --evaluations 6 --at-once 12 --target 0.9)
topk="topk:0.01,dgc,warmup=392;topk:0.01;topk:0.001,dgc,warmup=392;topk:0.01,feedback=0"
scale scale-strategies strategies "${resnet[@]}" --global-batch-size 512 --lr 0.4 --lr-warmup 490 \
  --strategies "int8;int4;$topk;powersgd:4;powersgd:2;slowmo:8;localsgd:8,after=1470"
scale scale-strategies-batch-128 strategies "${resnet[@]}" --global-batch-size 128 --lr 0.1 --lr-warmup 1955 \
  --strategies "topk:0.01,dgc,warmup=1564;topk:0.01;topk:0.001,dgc,warmup=1564;powersgd:4;powersgd:2"
"$python" "$here/strategy_controls.py" --data "cifar10:$cifar" --model resnet18 --device cuda --precision bf16 \
  --epochs 30 --batch-size 512 --lr 0.4 --weight-decay 0.0005 --lr-warmup 490 --seeds 5 | tee "$out/strategy_controls.txt"

if [ -n "$text" ]; then
  gpt=(--model gpt2-mini --data "text:$text" --device cuda --optimizer adamw --lr 1e-3 --weight-decay 0.1
    --lr-warmup 400 --workers 4 --batch-size 16 --context 128 --evaluations 4 --test-samples 2000 --at-once 6)
  scale scale-strategies-diloco strategies "${gpt[@]}" --steps 12000 --seeds 1 --strategies \
    "diloco:50,after=2400;diloco:500,after=2400;diloco:50,after=2400+int8;diloco:500,momentum=0.5,after=2400"
  scale scale-strategies-diloco-cold strategies "${gpt[@]}" --steps 8000 --seeds 1 \
    --strategies "diloco:50;diloco:500;diloco:50+int8;diloco:500+int8"
fi
