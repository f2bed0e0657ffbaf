/* What the files of the windows share: network_windows.c, and network_compressed.c for compressed allreduces. */
#ifndef ALLRED_NETWORK_WINDOWS_H
#define ALLRED_NETWORK_WINDOWS_H

#include "network.h"

/* A part of a window. */
typedef struct {
  size_t start, bytes;
} allred_part;

/*
 * What one kind of operation does with a window.
 *
 * reduces, gathers  which half of the ring's steps it takes
 * blocks            the blocks of some hosts, as a part of the window: what rank `slice` sends or receives in a step
 * fill              write this rank's numbers to the window
 * sum               complete the slice of this host in the window of this rank
 * cross             send and receive without waiting, and set `crossed`; return whether anything was done
 * drain             read results
 */
struct allred_window_kind {
  int reduces, gathers;
  allred_part (*blocks)(const allred_operation *op, uint64_t number, int slice, int first, int end);
  void (*fill)(allred_operation *op, uint64_t number);
  void (*sum)(allred_operation *op, uint64_t number);
  int (*cross)(allred_operation *op);
  void (*drain)(allred_operation *op, uint64_t number);
};

/* Return this rank's memory of a window; a block of its slice; whether all windows of the operation are filled. */
char *allred_own_window(const allred_operation *op, uint64_t number);
allred_part allred_own_block(const allred_operation *op, uint64_t number, int block);
int allred_all_filled(const allred_operation *op);

/* network_compressed.c. Return the bytes in which a window travels, if no block of a host ends within it. */
size_t allred_wire_bytes(const allred_operation *op, const allred_window *window);
void allred_begin_compressed(allred_operation *op);
int allred_cross_compressed(allred_operation *op);

#endif
