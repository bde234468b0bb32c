#!/usr/bin/env bash
# One node with 8 GPUs: GPUs 0 to 3 train, and vLLM samples on each of GPUs 4 to 7.
# Not run yet.
#
#   VLLM_PYTHON=/path/of/venv_vllm/bin/python bash docs/recipes/one_node.sh models/Qwen2.5-3B runs/one_node
#
# A model of 7B with a critic does not fit on four GPUs of 80 GB, see --mode=plan.
set -euo pipefail

model=$1
workdir=$2
python=${PYTHON:-python}
mkdir -p "$workdir"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

engines=()
for gpu in 4 5 6 7; do
  port=$((8000 + gpu))
  # An engine that ends is started again. The trainer gives it the newest weights.
  while true; do
    CUDA_VISIBLE_DEVICES=$gpu VLLM_SERVER_DEV_MODE=1 "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server \
      --host 127.0.0.1 --port "$port" --model "$model" --dtype bfloat16 --max-model-len 4096 \
      --logprobs-mode processed_logprobs || true
    sleep 5
  done >> "$workdir/engine_$gpu.log" 2>&1 &
  engines+=("http://127.0.0.1:$port")
done
for engine in "${engines[@]}"; do
  until curl --silent --fail --output /dev/null "$engine/health"; do
    sleep 5
  done
done

CUDA_VISIBLE_DEVICES=0,1,2,3 XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 "$python" run.py \
  --config=experiments/st_ppo_7b.py --config.name=st_ppo_3b \
  --config.model.folder="$model" \
  --config.train.micro_batch=4 \
  --config.rollout.engine="$(IFS=,; echo "${engines[*]}")" \
  --config.pipeline.staleness=1 \
  --workdir="$workdir"
