/*
 * The arena of this process: shared memory that serves blocks for arrays. Peers map it, and reduce arrays in place.
 *
 * The memory is a range of a sealed memfd; it is sparse. The metadata are private to the process. A free block is
 *
 *   cold  it has no pages: it reads as zeros. Pages are reserved (fallocate) before the block is served, because a
 *         failure at the first touch would be SIGBUS.
 *   warm  it has pages. The next block of this size costs no page faults, here and in the processes that map it.
 *
 * Freed blocks are warm while the pages of the arena are at most those that live blocks once had, and a reserve. Beyond
 * that, pages are given back (a hole is punched). Neighbouring free blocks of the same state are merged.
 *
 * fork(): a MAP_SHARED page would be shared with the child. Therefore the child replaces live blocks by private copies
 * before fork() returns in it, and serves nothing. The parent waits for these copies, so that the child never sees its
 * later writes. Other threads that write to arrays during the fork are not stopped.
 *
 * All functions are thread-safe. There is one arena in a process, and it is never closed, because arrays may outlive
 * everything else.
 */
#ifndef ALLRED_ARENA_H
#define ALLRED_ARENA_H

#include <stddef.h>

/* Make `bytes` bytes at `base` the arena: a shared mapping of the file `fd` from `offset`, without pages. All are
 * multiples of the page size. Returns 0, or -1 if there is no memory for the metadata. Call it once. */
int allred_arena_open(int fd, size_t offset, char *base, size_t bytes);

/* Return a block of at least `bytes` bytes, aligned to pages; `zeroed`: of zeros. NULL if `bytes` is 0, the arena is
 * full, frozen, or not open, in a child of fork(), or if the system has no pages: use another allocator. */
void *allred_arena_allocate(size_t bytes, int zeroed);

/* Whether the address is in the arena, also in a child of fork(). It takes no lock. */
int allred_arena_contains(const void *address);

/* The size in bytes of a live block; free it. `address`: as allocate() returned it. */
size_t allred_arena_block_bytes(const void *address);
void allred_arena_free(void *address);

/* Until the thaw no block is served or reused, because a late peer may still write into any of them. A block that is
 * freed meanwhile is held. */
void allred_arena_freeze(void);

/* End the freeze: no peer of before writes any more. Blocks that were held are free. */
void allred_arena_thaw(void);

typedef struct {
  size_t bytes, live, committed; /* the arena; live blocks; everything that has pages */
  int frozen;
  size_t full, no_pages; /* requests that were refused because the arena was full; because the system had no pages */
} allred_arena_usage;

allred_arena_usage allred_arena_get_usage(void);

/* The first byte of the arena; NULL without one. */
char *allred_arena_base(void);

#endif
