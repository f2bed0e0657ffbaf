/*
 * Copies into memory that other cores read.
 *
 * Between cores that share no cache a line that another core holds can be slow to write: 30 ns were measured, 2 GB/s,
 * for as long as the ring fits into the caches. Stores that go around the caches took a sixth of that then; but twice
 * the time of plain ones where the cores are near each other, or between most that are not. What a machine is like is
 * seen by how fast a plain copy is, and may change while it runs (virtual machines move). This is a rule of thumb:
 * where plain copies are slow for another reason (the first touch of the memory, a slow DRAM), some go around the
 * caches too.
 */
#ifndef ALLRED_COPY_H
#define ALLRED_COPY_H

#include <stddef.h>
#include <stdint.h>

/* How a rank copies at present. Zeros at first. */
typedef struct {
  int slow;   /* plain copies in a row that were slow */
  int around; /* copies still to be made around the caches, before a plain one is tried again */
} allred_pace;

/* A copy of one or more pieces: begin, the pieces, end. After `end` what was written may be published. */
uint64_t allred_copy_begin(void);
void allred_copy(const allred_pace *pace, char *to, const char *from, size_t bytes);
void allred_copy_end(allred_pace *pace, uint64_t begun, size_t bytes);

#endif
