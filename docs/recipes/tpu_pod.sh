#!/usr/bin/env bash
# A TPU pod that trains, and two TPU slices beside it that sample with the gateway of this package.
# Not run yet.
#
#   TRAINER=NAME ENGINES="NAME NAME" ZONE=us-east5-b bash docs/recipes/tpu_pod.sh \
#     /nfs/models/Qwen2.5-7B /nfs/data/train.parquet,/nfs/data/test.parquet http://HOST:8000/retrieve /nfs/runs/pod
#
# TRAINER is a v5e:8x8, and each of ENGINES is a v5e:2x4 in the same network. All of their hosts have
# this clone in ~/stppo, its packages, the same NFS folder under /nfs, and a file ~/.stppo_key of
# mode 600 with one random key. The key is read there, so that no command line shows it.
set -euo pipefail

model=$1
data=$2
retriever=$3
workdir=$4

# Runs a command on hosts of a TPU: $1 its name, $2 all or the number of a host.
on_hosts() {
  gcloud compute tpus tpu-vm ssh "$1" --zone="$ZONE" --worker="$2" --command="cd ~/stppo && $3"
}
stop_engines() {
  for engine in $ENGINES; do
    on_hosts "$engine" all 'pkill -f engine_loop; pkill -TERM -f mode=serve' || true
  done
}
trap stop_engines EXIT

addresses=''
for engine in $ENGINES; do
  # An engine that ends is started again. The trainer gives it the newest weights.
  serve="STPPO_API_KEY=\$(cat ~/.stppo_key) python run.py --mode=serve --distributed --port=8000 \
    --config=experiments/st_ppo_7b.py --config.model.folder=$model --config.mesh.fsdp=-1 \
    --config.serve.host=0.0.0.0 --config.serve.rows=128 --config.serve.max_waiting=1024 \
    --config.serve.max_total=4096 --config.serve.weights_folder=$workdir/weights \
    --config.serve.logprobs_mode=processed_logprobs --workdir=$workdir/$engine"
  on_hosts "$engine" all ": engine_loop; while true; do $serve || true; sleep 5; done" &
  host=$(gcloud compute tpus tpu-vm describe "$engine" --zone="$ZONE" \
    --format='value(networkEndpoints[0].ipAddress)')
  addresses+="${addresses:+,}http://$host:8000"
done
for address in ${addresses//,/ }; do
  on_hosts "$TRAINER" 0 "timeout 900 bash -c 'until curl -sf -o /dev/null $address/health; do sleep 5; done'"
done

on_hosts "$TRAINER" all "OPENAI_API_KEY=\$(cat ~/.stppo_key) python run.py --distributed \
  --config=experiments/st_ppo_7b.py --config.model.folder=$model \
  --config.data.source=$data --config.retriever.url=$retriever \
  --config.rollout.engine=$addresses --config.rollout.engine_kind=stppo \
  --config.rollout.engine_devices=8 --config.rollout.engine_folder=$workdir/weights \
  --config.pipeline.staleness=1 --workdir=$workdir"
