#!/bin/sh
# Make the job's key: 64 hexadecimal digits in a file that only its owner reads. Never put the key on a command line.
set -eu
key=${1:-job.key}
(umask 077; set -C; od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n' > "$key")
