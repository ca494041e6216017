#!/usr/bin/env bash
# Measure the runs under results/ with several NCCL ranks on one GPU. NCCL treats each rank as a separate host and uses
# sockets over loopback: like hosts with one GPU each on a network of about 25 Gb/s, not like NVLink.
#   PACELINE_HOST=a-name-for-this-machine benchmarks/nccl.sh FOLDER [allreduce accumulation scaling wrappers tuning fsdp]
# PYTHON sets the interpreter. Starts CUDA MPS if needed. allreduce, accumulation and scaling take about five minutes,
# wrappers ten, tuning ten, fsdp two. Keeps existing runs; BACKEND=gloo tests the commands on a CPU.
set -euo pipefail
out=${1:?the folder for the results}
shift
[ $# -gt 0 ] || set -- allreduce accumulation scaling wrappers tuning fsdp
python=${PYTHON:-python3}
backend=${BACKEND:-nccl}
job=(--backend "$backend" --device cuda)
ranks=2,4,6,8
[ "$backend" = nccl ] || { job=(--backend "$backend" --device cpu); ranks=2; }
export PACELINE_SHARE_GPUS=1
mkdir -p "$out"

if [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && command -v nvidia-cuda-mps-control > /dev/null; then
  mps=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$mps CUDA_MPS_LOG_DIRECTORY=$mps
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$mps"' EXIT
fi

. "$(dirname "$0")/study.sh"

for part in "$@"; do
  case $part in
    allreduce) # document 000: a table and charts over sizes and ranks
      if [ ! -e "$out/allreduce-$backend-shared-gpu" ]; then
        "$python" -m paceline bench allreduce "${job[@]}" --ranks "$ranks" --sizes 4KiB,64KiB,1MiB,4MiB,10MiB,25MiB,100MiB \
          --out "$out"
        mv "$out"/2*-bench-allreduce "$out/allreduce-$backend-shared-gpu"
      fi ;;
    accumulation) # document 001: the share of messages in kernel time, before and after accumulation
      BACKEND=$backend DEVICE=${job[3]} PYTHON=$python "$(dirname "$0")/accumulation.sh" "$out" ;;
    scaling) # document 002: weak and strong scaling of ResNet-18, time of communication, bandwidth
      scale "scale-ranks-resnet18-$backend" ranks "${job[@]}" --model resnet18 --ranks 1,2,4 --batch-size 32,128,512 \
        --global-batch-size 512 --iters "${ITERS:-30}" ;;
    wrappers)
      "$python" "$(dirname "$0")/nccl_wrappers.py" "$out/wrappers-$backend" --backend "$backend" ;;
    tuning)
      "$python" "$(dirname "$0")/validate_tuning.py" "$out/tuning-$backend" --kind nccl ;;
    fsdp) # fully sharded data parallel: predicted and measured steps
      "$python" "$(dirname "$0")/validate_fsdp.py" --backend "$backend" --ranks 2,4 | tee "$out/fsdp-$backend.md" ;;
    *)
      echo "$part: unknown part; use allreduce, accumulation, scaling, wrappers, tuning, fsdp" >&2
      exit 2 ;;
  esac
done
