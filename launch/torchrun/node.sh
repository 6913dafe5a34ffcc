#!/usr/bin/env bash
# qwen2-5-14b: 1 node with 8 trainer ranks each, 8 SGLang servers on 1 further node.
# Written by `megatron-stare launch --scheduler torchrun`. Run it on every node: node.sh INDEX [START]
#   INDEX: the node's place in the list of hosts, from 0.  START: counts starts of the whole job; default 0.
# All nodes need the same MEGATRON_STARE_API_KEY in their environment, or as the first line of standard input.
set -eu

export MEGATRON_STARE_HOSTS=node-a,node-b
export MEGATRON_STARE_NODE="${1:?the index of this node is missing: 0 to 1}"
export MEGATRON_STARE_JOB=qwen2-5-14b."${2:-0}"
export MEGATRON_STARE_TRAINER_NODES=1
export MEGATRON_STARE_RANKS_PER_NODE=8
if [ -z "${MEGATRON_STARE_API_KEY:-}" ]; then IFS= read -r MEGATRON_STARE_API_KEY; fi
export MEGATRON_STARE_API_KEY

cd /shared/work
exec /shared/work/.venv/bin/python -m megatron_stare.launch.node /shared/runs/qwen2.5-14b/launch/config.yaml
