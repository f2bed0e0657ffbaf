/*
 * Reduction in place: an allreduce of tensors that lie in memory shared by all ranks.
 *
 * Each rank has an arena, which all ranks map (segment.h). A tensor that lies in the arena of every rank is not copied:
 * each rank reduces a slice of all such tensors from the memory of all ranks, and writes the result to the memory of
 * all ranks. The other tensors pass through the ring.
 *
 * Round 0 of such an operation:
 *
 *   1  FILL          write the location of each large tensor in this rank's arena, or that it does not lie there
 *   2                publish the locations with the header, which has this rank's weight if there are weights
 *   3  WAIT_FILLED   wait until every rank has published; compare the headers. If they differ, nothing was written
 *   4                from the locations, every rank finds the same tensors that are reduced in place. If there are
 *                    none, go to 7
 *   5  REDUCE        reduce this rank's slice into the arrays of all ranks; publish this as tick 1, with the first
 *                    tensor of the slice that is not finite
 *   6  WAIT_REDUCED  wait until every rank has published its slice
 *   7  DRAIN         find the first tensor of all slices that is not finite. Plan the following rounds, in which the
 *                    other tensors pass through the ring
 *
 * Why no rank writes memory that another reads:
 *
 *   1  A rank writes only its slices, and no other rank reads or writes these between 3 and 6. Before 3 and after 6 the
 *      arrays belong to their rank, whose program holds them until the operation is complete.
 *   2  Locations are read in 4 and 5. They are in an inline slot, or in the chunk before that of round 1. No rank
 *      writes there again before all ranks have published round 1 or the next operation (operation.h).
 *
 * A slice is cut at multiples of 64 bytes within a tensor, so ranks write different lines of tensors that are aligned.
 * Elements are reduced in the order of the ranks, by the kernels of the ring: results are the same bits. With weights
 * both multiply the numbers of a rank by its weight, round the products, and add these: the ring while it fills a
 * chunk, here while a slice is reduced.
 *
 * If an operation is given up, another rank may still write to the arrays. So the caller freezes the arena (arena.h):
 * no memory in it is used again.
 */
#ifndef ALLRED_IN_PLACE_H
#define ALLRED_IN_PLACE_H

#include "operation.h"

/* Whether the allreduce begins with the exchange of locations; if so, prepare it. The result is the same on all ranks.
 */
int allred_begin_in_place(allred_operation *op);

/* Prepare the rounds in which the first `tensor_count` tensors of the table pass through the ring (allreduce.c). */
void allred_begin_ring(allred_operation *op);

#endif
