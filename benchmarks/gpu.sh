#!/usr/bin/env bash
# Everything that needs a GPU, as one command of at most eight minutes on an H100 without network.
#
#   benchmarks/gpu.sh OUT [PARCEL]            figures, SmolLM2's warm start, ST-PPO
#   VARIANT=ppo benchmarks/gpu.sh OUT         PPO from the same warm start
#
# PARCEL is a folder that `python -m benchmarks.parcels pack` made and that has just arrived. The
# parts that need a file of a later parcel are left out, and run when that parcel comes with the next
# call. STORE (default runs/gpu) stays between the calls. Delete it to begin again.
# OUT gets the results after each part: progress.jsonl (what was done, cut or left out),
# figures.jsonl, the metrics of the runs, and logs.tar.gz. benchmarks/gpu_job.py has the parts.
# LIMIT=SECONDS ends a call earlier than after 480 seconds: a run is continued by the next call, and
# a call that is killed from outside loses it. XLA_FLAGS= measures with XLA's own products.
# QUICK=1 runs every part in its smallest form on a CPU.
#
# Not run on a GPU yet.
set -euo pipefail
paths=()
for path in "$@"; do paths+=("$(realpath -m "$path")"); done
cd "$(dirname "$(realpath "$0")")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu_job "${paths[@]}"
