/* Which MPI function a thread is in, for the table of a stalled job. */
#ifndef ALLRED_MPI_CALL_H
#define ALLRED_MPI_CALL_H

/*
 * From now on, when signal `number` arrives, first write a line such as "MPI Send" to `fd` if the thread that receives
 * it is inside a function of MPI; then run the handler that is set now. Setting another handler undoes it. Return 0, or
 * -1 if it cannot be done.
 */
int allred_report_mpi_call(int number, int fd);

#endif
