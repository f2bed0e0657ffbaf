/* See arena.h. Sizes and positions are counted in units of a page. */
#define _GNU_SOURCE /* fallocate, mremap, pipe2 */
#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NONE UINT32_MAX
#define CLASSES 896
#define PIECE_BYTES ((size_t)16 << 20)
#define MAX_INTERRUPTS 100
#define RESERVE_BYTES ((size_t)16 << 20)

enum { COLD, WARM, LIVE, HELD };

/* The block that starts at a unit. Entries of other units are not used. */
typedef struct {
  uint32_t units, before;  /* before: the start of the block in front of it; NONE for the first */
  uint32_t next, previous; /* in the list of its class, if it is free */
  uint32_t state;
} block;

static struct {
  pthread_mutex_t mutex;
  int fd, frozen, inherited; /* inherited: this process is a child of fork() */
  size_t offset, bytes, unit;
  char *base;
  block *blocks;
  uint32_t end;                     /* the number of units; blocks[end] ends the blocks */
  uint32_t lists[2][CLASSES];       /* by state and class: the first free block */
  uint64_t filled[2][CLASSES / 64]; /* a bit for each list that is not empty */
  size_t live, warm, peak;          /* units; peak: the maximum of live */
  size_t full, no_pages;            /* as in allred_arena_usage */
  int fork_pipe[2];
} arena = {.mutex = PTHREAD_MUTEX_INITIALIZER, .fork_pipe = {-1, -1}};

/* ---- Size classes: 32 per power of two. The smallest size of a class is an exact number of units; requests are
 * rounded up to it (by at most 1/32), so every block of this class fits, and a freed block fits the same request. */

static int shift_of(uint32_t units) { return units < 32 ? 0 : 26 - __builtin_clz(units); }

static int class_of(uint32_t units) { return shift_of(units) * 32 + (int)(units >> shift_of(units)); }

static size_t round_up(size_t units) {
  const size_t mask = ((size_t)1 << shift_of((uint32_t)units)) - 1;
  return (units + mask) & ~mask;
}

/* ---- Lists of free blocks */

static void insert(uint32_t start) {
  block *b = &arena.blocks[start];
  const int class = class_of(b->units);
  uint32_t *head = &arena.lists[b->state][class];
  b->previous = NONE;
  b->next = *head;
  if (*head != NONE) arena.blocks[*head].previous = start;
  *head = start;
  arena.filled[b->state][class / 64] |= (uint64_t)1 << class % 64;
}

static void take_out(uint32_t start) {
  const block *b = &arena.blocks[start];
  const int class = class_of(b->units);
  if (b->next != NONE) arena.blocks[b->next].previous = b->previous;
  if (b->previous != NONE)
    arena.blocks[b->previous].next = b->next;
  else if ((arena.lists[b->state][class] = b->next) == NONE)
    arena.filled[b->state][class / 64] &= ~((uint64_t)1 << class % 64);
}

/* Return a free block of at least `units` (a class's smallest size), from the smallest class that has one; or NONE. */
static uint32_t find(int state, uint32_t units) {
  const int class = class_of(units);
  uint64_t mask = ~(uint64_t)0 << class % 64;
  for (int word = class / 64; word < CLASSES / 64; word++, mask = ~(uint64_t)0) {
    const uint64_t lists = arena.filled[state][word] & mask;
    if (lists) return arena.lists[state][word * 64 + __builtin_ctzll(lists)];
  }
  return NONE;
}

/* Let `start` become one block of `units`. */
static void set_block(uint32_t start, uint32_t units, int state) {
  arena.blocks[start].units = units;
  arena.blocks[start].state = (uint32_t)state;
  arena.blocks[start + units].before = start;
}

/* Make a block that is in no list a free one, merged with its neighbours of this state. Return the merged block. */
static uint32_t release(uint32_t start, int state) {
  uint32_t units = arena.blocks[start].units;
  const uint32_t after = start + units, before = arena.blocks[start].before;
  if (arena.blocks[after].state == (uint32_t)state) {
    take_out(after);
    units += arena.blocks[after].units;
  }
  if (before != NONE && arena.blocks[before].state == (uint32_t)state) {
    take_out(before);
    units += arena.blocks[before].units;
    start = before;
  }
  set_block(start, units, state);
  insert(start);
  return start;
}

/* ---- Pages */

/* In pieces, because a signal may undo a call: with a periodic timer, a call for a large block would never end. */
static int allocate_pages(uint32_t start, int mode) {
  const size_t bytes = arena.blocks[start].units * arena.unit;
  int interrupts = 0;
  for (size_t at = 0, piece; at < bytes;) {
    piece = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
    if (fallocate(arena.fd, mode, (off_t)(arena.offset + start * arena.unit + at), (off_t)piece) == 0)
      at += piece;
    else if (errno != EINTR || ++interrupts == MAX_INTERRUPTS)
      return -1;
  }
  return 0;
}

static int punch(uint32_t start) { return allocate_pages(start, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE); }

/* Give back the pages of a warm free block. Returns 0 on success. */
static int cool(uint32_t start) {
  if (punch(start)) return -1;
  take_out(start);
  arena.warm -= arena.blocks[start].units;
  release(start, COLD);
  return 0;
}

static void limit_warm_blocks(uint32_t freed) {
  const size_t most = arena.peak + arena.peak / 8 + RESERVE_BYTES / arena.unit;
  if (arena.live + arena.warm > most) cool(freed);
}

/* ---- The interface */

/* Take a block of `units` (a class's smallest size) from the free ones. Return its start, or NONE. was: its state. */
static uint32_t take(uint32_t units, int *was) {
  uint32_t start = find(WARM, units), other;
  if (start == NONE) start = find(COLD, units);
  if (start == NONE && arena.end - arena.live >= units)
    while (start == NONE && (other = find(WARM, 1)) != NONE && cool(other) == 0)
      start = find(COLD, units); /* cold blocks merge */
  if (start == NONE) return arena.full++, NONE;
  *was = (int)arena.blocks[start].state;
  take_out(start);
  const uint32_t rest = arena.blocks[start].units - units;
  set_block(start, units, LIVE);
  if (rest) {
    set_block(start + units, rest, *was);
    insert(start + units);
  }
  if (*was == COLD && allocate_pages(start, FALLOC_FL_KEEP_SIZE)) {
    punch(start); /* it may have got a part of the pages */
    release(start, COLD);
    return arena.no_pages++, NONE;
  }
  if (*was == WARM) arena.warm -= units;
  arena.live += units;
  if (arena.live > arena.peak) arena.peak = arena.live;
  return start;
}

void *allred_arena_allocate(size_t bytes, int zeroed) {
  uint32_t start = NONE;
  int was = COLD;
  pthread_mutex_lock(&arena.mutex);
  if (bytes && arena.bytes && !arena.frozen && !arena.inherited) {
    const size_t units = bytes <= arena.bytes ? round_up((bytes + arena.unit - 1) / arena.unit) : SIZE_MAX;
    if (units <= arena.end)
      start = take((uint32_t)units, &was);
    else
      arena.full++;
  }
  pthread_mutex_unlock(&arena.mutex);
  if (start == NONE) return NULL;
  char *address = arena.base + start * arena.unit;
  return zeroed && was == WARM ? memset(address, 0, bytes) : address;
}

int allred_arena_contains(const void *address) { return (uintptr_t)address - (uintptr_t)arena.base < arena.bytes; }

char *allred_arena_base(void) { return arena.base; }

static uint32_t start_of(const void *address) { return (uint32_t)(((const char *)address - arena.base) / arena.unit); }

size_t allred_arena_block_bytes(const void *address) {
  pthread_mutex_lock(&arena.mutex);
  const size_t bytes = arena.blocks[start_of(address)].units * arena.unit;
  pthread_mutex_unlock(&arena.mutex);
  return bytes;
}

/* Make a block that is in no list a warm free one. Return the merged block. */
static uint32_t recycle(uint32_t start) {
  const uint32_t units = arena.blocks[start].units;
  arena.live -= units;
  arena.warm += units;
  start = release(start, WARM);
  limit_warm_blocks(start);
  return start;
}

void allred_arena_free(void *address) {
  const uint32_t start = start_of(address);
  pthread_mutex_lock(&arena.mutex);
  const uint32_t units = arena.blocks[start].units;
  if (arena.inherited) {
    madvise(address, units * arena.unit, MADV_DONTNEED); /* a private copy */
  } else if (arena.frozen) {
    arena.blocks[start].state = HELD;
  } else {
    recycle(start);
  }
  pthread_mutex_unlock(&arena.mutex);
}

void allred_arena_freeze(void) {
  pthread_mutex_lock(&arena.mutex);
  arena.frozen = 1;
  pthread_mutex_unlock(&arena.mutex);
}

void allred_arena_thaw(void) {
  pthread_mutex_lock(&arena.mutex);
  arena.frozen = 0;
  for (uint32_t start = 0; arena.bytes && !arena.inherited && start < arena.end; start += arena.blocks[start].units)
    if (arena.blocks[start].state == HELD) start = recycle(start);
  pthread_mutex_unlock(&arena.mutex);
}

allred_arena_usage allred_arena_get_usage(void) {
  pthread_mutex_lock(&arena.mutex);
  const allred_arena_usage usage = {
      arena.bytes, arena.live * arena.unit, (arena.live + arena.warm) * arena.unit, arena.frozen,
      arena.full,  arena.no_pages};
  pthread_mutex_unlock(&arena.mutex);
  return usage;
}

/* ---- fork() */

static void before_fork(void) {
  pthread_mutex_lock(&arena.mutex);
  arena.fork_pipe[0] = arena.fork_pipe[1] = -1;
  if (arena.live && !arena.inherited && pipe2(arena.fork_pipe, O_CLOEXEC))
    arena.fork_pipe[0] = arena.fork_pipe[1] = -1; /* no descriptor: the parent does not wait */
}

/* Wait until the child has closed its end of the pipe: it has copied the blocks, or is dead. */
static void in_parent(void) {
  char byte;
  if (arena.fork_pipe[0] >= 0) {
    close(arena.fork_pipe[1]);
    while (read(arena.fork_pipe[0], &byte, 1) < 0 && errno == EINTR) continue;
    close(arena.fork_pipe[0]);
  }
  pthread_mutex_unlock(&arena.mutex);
}

/* Replace live blocks, from `start` to `end`, by private copies at the same addresses. */
static void make_private(uint32_t start, uint32_t end) {
  const size_t bytes = (end - start) * arena.unit;
  char *address = arena.base + start * arena.unit;
  char *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy != MAP_FAILED) memcpy(copy, address, bytes);
  if (copy == MAP_FAILED || mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED) {
    dprintf(STDERR_FILENO, "allred: a child of fork() has no memory to copy %zu bytes of shared arrays; it ends\n",
            bytes);
    _exit(1); /* it would write into the arrays of its parent */
  }
}

static void in_child(void) {
  uint32_t live = NONE; /* the start of a run of live blocks */
  for (uint32_t start = 0; !arena.inherited && start <= arena.end; start += arena.blocks[start].units) {
    const int is_live = start < arena.end && arena.blocks[start].state == LIVE;
    if (is_live && live == NONE) live = start;
    if (!is_live && live != NONE) {
      make_private(live, start);
      live = NONE;
    }
    if (start == arena.end) break;
  }
  arena.inherited = 1;
  if (arena.fork_pipe[0] >= 0) {
    close(arena.fork_pipe[0]);
    close(arena.fork_pipe[1]);
  }
  pthread_mutex_unlock(&arena.mutex);
}

int allred_arena_open(int fd, size_t offset, char *base, size_t bytes) {
  const size_t unit = (size_t)sysconf(_SC_PAGESIZE), units = bytes / unit;
  if (!units || units >= NONE) return -1;
  block *blocks = mmap(NULL, (units + 1) * sizeof *blocks, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (blocks == MAP_FAILED) return -1;
  if (pthread_atfork(before_fork, in_parent, in_child)) return munmap(blocks, (units + 1) * sizeof *blocks), -1;
  pthread_mutex_lock(&arena.mutex);
  arena.fd = fd, arena.offset = offset, arena.unit = unit;
  arena.end = (uint32_t)units;
  arena.blocks = blocks;
  memset(arena.lists, 0xff, sizeof arena.lists);
  blocks[0].before = NONE;
  set_block(0, arena.end, COLD);
  insert(0);
  blocks[arena.end].state = LIVE;
  arena.base = base, arena.bytes = units * unit;
  pthread_mutex_unlock(&arena.mutex);
  return 0;
}
