/*
 * Copies into memory that other cores read.
 *
 * Between cores that share no cache, a line that another core holds can be slow to write: 30 ns per line (2 GB/s) were
 * measured while the ring fits into the caches. Streaming stores, which bypass the caches, then took a sixth of the
 * time; between cores that are close to each other, and between most others, they took twice the time of plain stores.
 * The copy policy decides by the measured speed of plain copies, which can change while the program runs (virtual
 * machines move). It is a heuristic: if plain copies are slow for another reason (first touch of the memory, slow
 * DRAM), some copies use streaming stores too.
 */
#ifndef ALLRED_COPY_H
#define ALLRED_COPY_H

#include <stddef.h>
#include <stdint.h>

/* How a rank copies at present. Initially zeros. */
typedef struct {
  int slow_copies; /* consecutive slow plain copies */
  int streaming;   /* copies that still use streaming stores, before a plain copy is tried again */
} allred_copy_policy;

/* A copy of one or more pieces: begin, then the pieces, then end. Publish the copied bytes only after `end`. */
uint64_t allred_copy_begin(void);
void allred_copy(const allred_copy_policy *policy, char *to, const char *from, size_t bytes);
void allred_copy_end(allred_copy_policy *policy, uint64_t begun, size_t bytes);

/* Copy by streaming stores. A flag that is stored afterwards covers the copied bytes. */
void allred_copy_streaming(char *to, const char *from, size_t bytes);

#endif
