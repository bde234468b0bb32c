#!/usr/bin/env bash
# A TPU pod that trains and samples without a shared folder: its checkpoints are in a bucket.
# Not run yet.
#
#   TRAINER=NAME ZONE=us-east5-b bash docs/recipes/tpu_bucket.sh \
#     models/Qwen2.5-7B data/train.parquet,data/test.parquet http://HOST:8000/retrieve first gs://BUCKET
#
# All hosts of TRAINER have this clone in ~/stppo with its packages and the extra `bucket`, and the
# model and the data in it. Their service account may read, write and delete objects of the bucket.
# The run's other files are in ~/stppo/runs/NAME of host 0. If the pod is lost, the same command on a
# new one continues from the newest checkpoint in the bucket.
set -euo pipefail

model=$1
data=$2
retriever=$3
name=$4
bucket=$5

gcloud compute tpus tpu-vm ssh "$TRAINER" --zone="$ZONE" --worker=all --command="cd ~/stppo && \
  python run.py --distributed --config=experiments/st_ppo_7b.py --config.model.folder=$model \
  --config.data.source=$data --config.retriever.url=$retriever \
  --config.train.checkpoint_folder=$bucket/$name --workdir=runs/$name"
