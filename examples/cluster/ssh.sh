#!/bin/sh
# One job on several hosts by plain ssh, without a scheduler.
#
#   HOSTS="a b c" REGISTER=etcd://a:2379,b:2379,c:2379/job INTERFACE=10.0.0.0/24 ./ssh.sh train.py --steps 1000
#
# The script, this Python environment and job.key lie at the same paths on all hosts: scp -p keeps the key's mode 0600.
set -eu
here=$(pwd)
nodes=$(echo "$HOSTS" | wc -w)
for host in $HOSTS; do
    ssh -tt "$host" "cd '$here' && exec '$here/.venv/bin/holdfast' run --nnodes $nodes --nproc ${NPROC:-2} \
        --spares ${SPARES:-0} --restarts 5 --register '$REGISTER' --interface '$INTERFACE' --key-file job.key \
        --node '$host' --logs '/tmp/holdfast-$(id -u)/logs' $*" </dev/null &
done
wait
