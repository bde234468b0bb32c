#!/usr/bin/env bash
# A TPU pod that trains, and two TPU slices beside it that sample with the gateway of this package.
# Not run yet.
#
#   TRAINER=NAME ENGINES="NAME NAME" ZONE=us-east5-b bash docs/recipes/tpu_pod.sh /nfs/models/Qwen2.5-7B /nfs/runs/pod
#
# TRAINER is a v5e:8x8, and each of ENGINES is a v5e:2x4 in the same network. All of their hosts have
# this clone in ~/stppo, its packages, and the same NFS folder under /nfs.
set -euo pipefail

model=$1
workdir=$2
key=$(python3 -c 'import secrets; print(secrets.token_hex(16))')

# Runs a command on all hosts of a TPU.
on_all_hosts() {
  gcloud compute tpus tpu-vm ssh "$1" --zone="$ZONE" --worker=all --command="cd ~/stppo && $2"
}

addresses=''
for engine in $ENGINES; do
  on_all_hosts "$engine" "STPPO_API_KEY=$key python run.py --mode=serve --distributed --port=8000 \
    --config=experiments/st_ppo_7b.py --config.model.folder=$model --config.mesh.fsdp=-1 \
    --config.serve.host=0.0.0.0 --config.serve.rows=128 --config.serve.max_waiting=1024 \
    --config.serve.max_total=4096 --config.serve.weights_folder=$workdir/weights \
    --config.serve.logprobs_mode=processed_logprobs --workdir=$workdir/$engine" &
  host=$(gcloud compute tpus tpu-vm describe "$engine" --zone="$ZONE" \
    --format='value(networkEndpoints[0].ipAddress)')
  addresses+="${addresses:+,}http://$host:8000"
done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

on_all_hosts "$TRAINER" "OPENAI_API_KEY=$key python run.py --distributed \
  --config=experiments/st_ppo_7b.py --config.model.folder=$model \
  --config.rollout.engine=$addresses --config.rollout.engine_kind=stppo \
  --config.rollout.engine_devices=8 --config.rollout.engine_folder=$workdir/weights \
  --config.pipeline.staleness=1 --workdir=$workdir"
