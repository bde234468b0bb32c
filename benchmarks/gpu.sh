#!/usr/bin/env bash
# Everything that needs a GPU, as one resumable job: SmolLM2 warm start, ST-PPO and PPO, then figures
# relative to the chip's peak.
#
#   benchmarks/gpu.sh MODEL DATA OUT [SECONDS]
#
# MODEL: SmolLM2-135M-Instruct as a Hugging Face folder (docs/gguf.md converts a GGUF file).
# DATA: a folder with general_qa.jsonl and general_corpus.jsonl. OUT: where everything goes.
# The job runs in the background, unless it is already running; this command waits SECONDS for it
# (default 570). The same command again continues to wait, resumes a killed job and repeats failed steps.
# Exit status 0: done; 75: still running; 1: a step failed (OUT/progress names it).
# After every call OUT/results has the reports, metrics, figures and logs.
#
#   UPDATES=120     per reinforcement learning run
#   QUICK=1         minutes on a CPU, to try the script: embedded model and questions, 2 updates;
#                   MODEL is then only compared, and may be stppo_jax/assets/tiny
#
# Not run on a GPU yet.
set -euo pipefail
SELF=$(realpath "$0")

usage() { sed -n '2,/^# Not run/p' "$SELF" | sed 's/^# \{0,1\}//'; exit 2; }

main() {
  [ $# -ge 3 ] || usage
  MODEL=$(realpath "$1") DATA=$(realpath "$2") OUT=$(realpath -m "$3")
  mkdir -p "$OUT/done" "$OUT/logs" "$OUT/results"
  export MODEL DATA OUT
  # The job holds the lock while it runs, so getting the lock here means that there is no job.
  if flock -n "$OUT/lock" true; then
    setsid flock -n "$OUT/lock" "$SELF" --job </dev/null >>"$OUT/logs/job.log" 2>&1 &
    sleep 1
  fi
  if flock -w "${4:-570}" "$OUT/lock" true; then state=0; else state=75; fi
  collect
  cat "$OUT/progress"
  if [ $state = 0 ] && grep -q failed "$OUT/progress"; then state=1; fi
  exit $state
}

job() {
  cd "$(dirname "$SELF")/.."
  export JAX_COMPILATION_CACHE_DIR=$OUT/cache PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
  PYTHON=${PYTHON:-python3} FIGURES=$OUT/figures.jsonl
  if [ -n "${QUICK:-}" ]; then
    form=smoke run=:smoke sft=(--steps=4 --rows=4 --micro_batch=2 --per_task=1 --held_out=4)
    settings=() bench=(--quick --repeats=1) sizes=(135M)
    passages=stppo_jax/assets/knowledge/corpus.jsonl
  else
    form='' run='' sft=(--source="$DATA/general_qa.jsonl" --corpus="$DATA/general_corpus.jsonl")
    settings=(--config.data.source="$DATA/general_qa.jsonl" --config.train.updates="${UPDATES:-120}"
              --config.data.corpus="$DATA/general_corpus.jsonl" --config.model.folder="$OUT/sft")
    bench=(--repeats=5) sizes=(135M 1.5B 7B)
    passages=$DATA/general_corpus.jsonl
  fi
  rm -f "$OUT/progress"
  step ceilings figure --part=ceilings
  step numerics figure --part=numerics --model="$MODEL" --passages="$passages"
  step sft "$PYTHON" -m scripts.sft_smollm2 --form="$form" --model="$MODEL" --out="$OUT/sft" "${sft[@]}"
  if [ -e "$OUT/done/sft" ]; then
    for variant in st_ppo ppo; do
      step $variant "$PYTHON" run.py --config=experiments/st_ppo_smollm2.py$run --workdir="$OUT/$variant" \
        --config.algorithm.variant=$variant --config.name="${variant}_smollm2" "${settings[@]}"
    done
  fi
  for size in "${sizes[@]}"; do
    step "update_$size" figure --part=update --size=$size
    step "rollout_$size" figure --part=rollout --size=$size
  done
  echo "end" >>"$OUT/progress"
}

step() {  # NAME COMMAND..: runs it unless it is done
  local name=$1 started=$SECONDS
  shift
  [ ! -e "$OUT/done/$name" ] || { echo "$name: done before" >>"$OUT/progress"; return 0; }
  echo "$name: begun" >>"$OUT/progress"
  if "$@" >>"$OUT/logs/$name.log" 2>&1; then
    touch "$OUT/done/$name"
    echo "$name: done in $((SECONDS - started)) s" >>"$OUT/progress"
  else
    echo "$name: failed after $((SECONDS - started)) s, see logs/$name.log" >>"$OUT/progress"
  fi
}

figure() { "$PYTHON" -m benchmarks.gpu "$@" "${bench[@]}" | tee -a "$FIGURES"; }

collect() {
  for variant in st_ppo ppo; do
    for file in report.html metrics.jsonl config.json; do
      [ ! -e "$OUT/$variant/$file" ] || cp "$OUT/$variant/$file" "$OUT/results/${variant}_$file"
    done
  done
  [ ! -e "$OUT/figures.jsonl" ] || cp "$OUT/figures.jsonl" "$OUT/results/"
  tar -czf "$OUT/results/logs.tar.gz" -C "$OUT" logs progress
}

if [ "${1:-}" = --job ]; then job; else main "$@"; fi
