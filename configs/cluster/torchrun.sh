#!/bin/bash
# torchrun on 1 to 4 hosts, which may come and go; typed on each of them, with the name of one that stays:
#
#   configs/cluster/torchrun.sh HOST0 --config configs/imagenet_resnet50.yaml
#
# When a rank fails, or a host is lost or joins, all ranks are started again on the hosts that are there, and go on from
# what the job has saved. With virtual ranks (as many as the largest run has devices, a power of two) the weights are the
# same bits whatever hosts came and went. The run folder must be on a file system that all hosts see.
set -euo pipefail
host0=$1
shift

# torch 2.14 otherwise lets ranks meet at a store that knows addresses of those before them (PyTorch 135712), and does
# not tell it to a host that joins.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 100 \
  --rdzv-backend c10d --rdzv-endpoint "$host0:29500" \
  --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m lit_dp fit "$@" --trainer.num_nodes auto --trainer.strategy.virtual_ranks 32 --last.every_n_steps 500
