#!/bin/sh
# Ranks started by torchrun, on this host: one agent for each process, so that one death reaches no other.
#
#   PROCESSES=4 HOLDFAST_SIZE=3 HOLDFAST_JOB=job HOLDFAST_REGISTER=sqlite://$PWD/job.sqlite HOLDFAST_KEY_FILE=$PWD/job.key \
#       ./torchrun.sh train.py
#
# With more workers for one agent, torchrun ends them all when one fails; with --max-restarts above 0 it starts all of
# them again. Run it on each host, with HOLDFAST_REGISTER=etcd://... and HOLDFAST_INTERFACE, for a job on several.
set -eu
number=0
while [ "$number" -lt "$PROCESSES" ]; do
    torchrun --standalone --nproc-per-node 1 --max-restarts 0 "$@" &
    number=$((number + 1))
done
wait
