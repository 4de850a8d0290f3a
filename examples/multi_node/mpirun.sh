#!/bin/bash
# One process per line of a host file, each with all GPUs of its host:
#     bash examples/multi_node/mpirun.sh hosts.txt [zjax settings]
# The address is given because Open MPI 5 no longer tells where process 0 runs.
set -euo pipefail

hosts=$1
shift
first=$(awk 'NF && $1 !~ /^#/ {print $1; exit}' "$hosts")
export ZJAX_EXAMPLE_ADDRESS="$first:5757"

# mpirun fills in the number of each process, so each needs a shell of its own.
mpirun --hostfile "$hosts" --map-by ppr:1:node --bind-to none \
    -x PATH -x ZJAX_EXAMPLE_ADDRESS \
    bash -c 'exec zjax train \
        --config=configs/gpt2_124m.py \
        --config.directory="$PWD/runs/gpt2_124m" \
        --config.processes.coordinator="$ZJAX_EXAMPLE_ADDRESS" \
        --config.processes.num_processes="$OMPI_COMM_WORLD_SIZE" \
        --config.processes.process_id="$OMPI_COMM_WORLD_RANK" \
        "$@"' zjax "$@"
