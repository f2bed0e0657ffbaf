# Runs a rank of `allred run`, with RANK and LOCAL_RANK unless the user has set them (torch_variables.py).
#   sh rank_variables.sh PROGRAM ARGUMENTS...
# This process becomes the program, so that launchers and watchers see the rank itself.
export RANK="${RANK-${OMPI_COMM_WORLD_RANK-$PMI_RANK}}"
export LOCAL_RANK="${LOCAL_RANK-${OMPI_COMM_WORLD_LOCAL_RANK-$MPI_LOCALRANKID}}"
exec "$@"
