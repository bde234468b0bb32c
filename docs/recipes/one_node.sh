#!/usr/bin/env bash
# One node with 8 GPUs: GPUs 0 to 3 train, and vLLM samples on each of GPUs 4 to 7.
# Not run yet.
#
#   PYTHON=.venv/bin/python VLLM_PYTHON=.vllm/bin/python bash docs/recipes/one_node.sh \
#     experiments/grpo_7b.py models/Qwen2.5-7B data/train.parquet,data/test.parquet \
#     http://HOST:8000/retrieve runs/grpo_7b
#
# Further arguments go to run.py, and VLLM_FLAGS to each engine. A model of 7B fits on four GPUs of
# 80 GB without a critic or with LoRA, and a model of 3B fits with a critic, see --mode=plan.
set -euo pipefail
set -m  # each background job is a process group of its own, which can be ended as a whole

experiment=$1
model=$2
data=$3
retriever=$4
workdir=$5
python=${PYTHON:-python}
mkdir -p "$workdir"

groups=()
stop_engines() {
  for group in "${groups[@]}"; do
    kill -- "-$group" 2>/dev/null || true
  done
}
trap stop_engines EXIT

engines=()
for gpu in 4 5 6 7; do
  port=$((8000 + gpu))
  # An engine that ends is started again. The trainer gives it the newest weights.
  while true; do
    CUDA_VISIBLE_DEVICES=$gpu VLLM_SERVER_DEV_MODE=1 "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server \
      --host 127.0.0.1 --port "$port" --model "$model" --dtype bfloat16 --max-model-len 4096 \
      --logprobs-mode processed_logprobs ${VLLM_FLAGS:-} || true
    sleep 5
  done >> "$workdir/engine_$gpu.log" 2>&1 &
  groups+=($!)
  engines+=("http://127.0.0.1:$port")
done

wait_for() {
  for _ in $(seq 180); do
    curl --silent --fail --output /dev/null "$1/health" && return
    sleep 5
  done
  echo "$1 did not start within 15 minutes, see $workdir/engine_*.log" >&2
  return 1
}
for engine in "${engines[@]}"; do
  wait_for "$engine"
done

CUDA_VISIBLE_DEVICES=0,1,2,3 XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 "$python" run.py \
  --config="$experiment" \
  --config.model.folder="$model" \
  --config.data.source="$data" \
  --config.retriever.url="$retriever" \
  --config.rollout.engine="$(IFS=,; echo "${engines[*]}")" \
  --config.pipeline.staleness=1 \
  --workdir="$workdir" "${@:6}" &
trainer=$!
trap 'kill -TERM "$trainer"; wait "$trainer"' TERM INT  # the run saves before it ends
wait "$trainer"
