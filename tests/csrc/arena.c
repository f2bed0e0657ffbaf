/*
 * The arena's allocator. Run by `make sanitize` under AddressSanitizer and ThreadSanitizer.
 *
 *   arena [TURNS]   this number of allocations per thread
 *
 * Every block is filled with a number of its own, which must be there when it is freed: blocks do not overlap. After
 * each part the pages of the file are compared with what the arena reports. fallocate() is replaced, so that it can
 * fail.
 */
#define _GNU_SOURCE /* memfd_create */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "arena.h"

#define PAGE ((size_t)4096)
#define ARENA_BYTES ((size_t)64 << 20)
#define THREADS 4
#define BLOCKS 24 /* of a thread */
#define MOST_BYTES (512 << 10)

static int file, turns = 20000;
static _Atomic int no_pages; /* fallocate() reserves nothing */

int __real_fallocate(int fd, int mode, off_t offset, off_t bytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (!no_pages || mode & FALLOC_FL_PUNCH_HOLE) return __real_fallocate(fd, mode, offset, bytes);
  __real_fallocate(fd, mode, offset, (bytes + 1) / 2); /* a part of the pages */
  errno = ENOSPC;
  return -1;
}

#ifdef UNLOCKED /* stands for pthread_mutex_lock and _unlock in arena.c */
int no_lock(pthread_mutex_t *mutex) { return (void)mutex, 0; }
#endif

#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "arena.c:%d: this is not so: %s\n", __LINE__, #condition);                                       \
      _exit(1);                                                                                                        \
    }                                                                                                                  \
  } while (0)

typedef struct {
  uint64_t *address, mark;
  size_t bytes;
} held;

static uint64_t roll(uint64_t *dice) {
  *dice = *dice * 6364136223846793005u + 1442695040888963407u;
  return *dice >> 33;
}

/* Marks are at both ends of a block and in each of its pages. */
static void mark_block(const held *h, int check) {
  for (size_t at = 0; at < h->bytes / 8; at += PAGE / 8) {
    if (check) CHECK(h->address[at] == h->mark);
    h->address[at] = h->mark;
  }
  if (check) CHECK(h->address[h->bytes / 8 - 1] == h->mark);
  h->address[h->bytes / 8 - 1] = h->mark;
}

static void check_pages(void) {
  struct stat status;
  const allred_arena_usage usage = allred_arena_get_usage();
  CHECK(fstat(file, &status) == 0);
  CHECK((size_t)status.st_blocks * 512 == usage.committed);
  CHECK(usage.live <= usage.committed && usage.committed <= usage.bytes);
}

static void *use(void *argument) {
  uint64_t dice = (uint64_t)(uintptr_t)argument;
  held blocks[BLOCKS] = {{NULL, 0, 0}};
  for (int turn = 0; turn < turns; turn++) {
    held *h = &blocks[roll(&dice) % BLOCKS];
    if (h->address) {
      mark_block(h, 1);
      allred_arena_free(h->address);
      h->address = NULL;
      continue;
    }
    const int zeroed = roll(&dice) % 4 == 0;
    h->bytes = 8 * (1 + roll(&dice) % (roll(&dice) % 2 ? 4096 : MOST_BYTES / 8));
    h->mark = ((uint64_t)(uintptr_t)argument << 32) + (uint64_t)turn;
    h->address = allred_arena_allocate(h->bytes, zeroed);
    CHECK(h->address && allred_arena_contains(h->address) && (uintptr_t)h->address % PAGE == 0);
    CHECK(allred_arena_block_bytes(h->address) >= h->bytes);
    for (size_t at = 0; zeroed && at < h->bytes / 8; at += at % 61 + 1) CHECK(!h->address[at]);
    mark_block(h, 0);
  }
  for (int i = 0; i < BLOCKS; i++)
    if (blocks[i].address) mark_block(&blocks[i], 1), allred_arena_free(blocks[i].address);
  return NULL;
}

static void threads(void) {
  pthread_t ids[THREADS];
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&ids[i], NULL, use, (void *)(uintptr_t)(i + 1)) == 0);
  for (int i = 0; i < THREADS; i++) pthread_join(ids[i], NULL);
  CHECK(allred_arena_get_usage().live == 0);
  check_pages();
}

static void exhaustion(void) {
  char *all = allred_arena_allocate(ARENA_BYTES, 1); /* all free blocks are merged */
  CHECK(all && !all[0] && !all[ARENA_BYTES - 1]);
  CHECK(!allred_arena_allocate(1, 0));
  all[ARENA_BYTES - 1] = 1;
  allred_arena_free(all);
  CHECK(!allred_arena_allocate(ARENA_BYTES + 1, 0) && !allred_arena_allocate(SIZE_MAX, 0));
  CHECK(!allred_arena_allocate(0, 0));
  check_pages();
}

/* A block that fits neither into a warm nor into the cold part takes both, and reads as zeros. */
static void merged_states(void) {
  const size_t most = ARENA_BYTES / 8;
  char *first = allred_arena_allocate(most / 8, 0), *wall = allred_arena_allocate(1, 0);
  char *half = allred_arena_allocate(3 * most, 0);
  memset(half, 1, 3 * most);
  allred_arena_free(first);
  allred_arena_free(half);
  char *large = allred_arena_allocate(7 * most, 1);
  CHECK(large);
  for (size_t at = 0; at < 7 * most; at += PAGE) CHECK(!large[at]);
  check_pages();
  allred_arena_free(large);
  allred_arena_free(wall);
}

/* Pages that no request fits into are given back, once they are many. */
static void limit(void) {
  char *blocks[56];
  for (int i = 0; i < 56; i++) blocks[i] = allred_arena_allocate(MOST_BYTES, 0);
  for (int i = 0; i < 56; i++)
    if (i % 4) allred_arena_free(blocks[i]);
  const size_t live = allred_arena_get_usage().live;
  CHECK(allred_arena_get_usage().committed == 56 * MOST_BYTES);
  char *large = allred_arena_allocate(42 * MOST_BYTES, 0);
  CHECK(large && allred_arena_get_usage().committed == 98 * MOST_BYTES);
  allred_arena_free(large);
  CHECK(allred_arena_get_usage().committed <= 56 * MOST_BYTES && allred_arena_get_usage().live == live);
  check_pages();
  for (int i = 0; i < 56; i += 4) allred_arena_free(blocks[i]);
}

/* The arena has no pages yet, and the system has too few. */
static void missing_pages(void) {
  no_pages = 1;
  CHECK(!allred_arena_allocate(MOST_BYTES, 0));
  CHECK(allred_arena_get_usage().committed == 0);
  check_pages();
  no_pages = 0;
}

/* The blocks of steps of different sizes, freed in another order: their pages stay, and do not become more. */
static void steps(void) {
  char *blocks[100];
  size_t committed = 0;
  uint64_t dice = 1;
  for (int step = 0; step < turns / 10; step++) {
    for (int i = 0; i < 100; i++) CHECK((blocks[i] = allred_arena_allocate((size_t)(1 + i * i) * 50, 0)));
    for (int i = 99; i >= 0; i--) {
      const int other = (int)(roll(&dice) % (uint64_t)(i + 1));
      allred_arena_free(blocks[other]);
      blocks[other] = blocks[i];
    }
    const size_t now = allred_arena_get_usage().committed;
    if (step == 10) committed = now;
    if (step > 10) CHECK(now == committed);
  }
  check_pages();
}

static void wait_for(int child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static _Atomic int stop;

static void *disturb(void *unused) {
  while (!stop) {
    char *block = allred_arena_allocate(3 * PAGE, 0);
    block[0] = 1;
    allred_arena_free(block);
  }
  return unused;
}

/* A child sees the values of the fork; neither process sees what the other writes later. */
static void forks(void) {
  pthread_t id;
  int *a = allred_arena_allocate(PAGE, 0), *b = allred_arena_allocate(5 * PAGE, 0), ends[2];
  CHECK(pthread_create(&id, NULL, disturb, NULL) == 0);
  for (int turn = 0; turn < 20; turn++) {
    a[0] = b[5000] = turn;
    CHECK(pipe(ends) == 0);
    const int child = fork();
    CHECK(child >= 0);
    if (!child) {
      char byte;
      CHECK(read(ends[0], &byte, 1) == 1); /* the parent has written */
      CHECK(a[0] == turn && b[5000] == turn);
      a[0] = b[5000] = -1;
      CHECK(!allred_arena_allocate(PAGE, 0));
      CHECK(allred_arena_contains(a) && allred_arena_block_bytes(b) >= 5 * PAGE);
      const int grandchild = fork();
      if (!grandchild) {
        a[0] = -2;
        _exit(0);
      }
      wait_for(grandchild);
      CHECK(a[0] == -1);
      allred_arena_free(b);
      _exit(0);
    }
    a[0] = b[5000] = 1000 + turn;
    CHECK(write(ends[1], "", 1) == 1);
    wait_for(child);
    CHECK(a[0] == 1000 + turn && b[5000] == 1000 + turn);
    close(ends[0]);
    close(ends[1]);
  }
  stop = 1;
  pthread_join(id, NULL);
  allred_arena_free(a);
  allred_arena_free(b);
}

static void freeze(void) {
  enum { HELD = 7 };
  int *blocks[HELD], *block = allred_arena_allocate(PAGE, 0);
  *block = 7;
  for (int i = 0; i < HELD; i++) blocks[i] = allred_arena_allocate((size_t)(i + 1) * PAGE, 0);
  for (int freed = 0; freed < 1 << HELD; freed++) { /* each set of blocks, of which some are neighbours */
    allred_arena_freeze();
    const allred_arena_usage before = allred_arena_get_usage();
    for (int i = 0; i < HELD; i++)
      if (freed >> i & 1) allred_arena_free(blocks[i]);
    CHECK(!allred_arena_allocate(PAGE, 0));
    CHECK(*block == 7 && allred_arena_get_usage().live == before.live && before.frozen);
    allred_arena_thaw();
    const allred_arena_usage after = allred_arena_get_usage();
    size_t units = 0;
    for (int i = 0; i < HELD; i++) units += freed >> i & 1 ? (size_t)i + 1 : 0;
    CHECK(!after.frozen && after.live == before.live - units * PAGE && after.committed <= before.committed);
    for (int i = 0; i < HELD; i++)
      if (freed >> i & 1) CHECK((blocks[i] = allred_arena_allocate((size_t)(i + 1) * PAGE, 0)));
    CHECK(allred_arena_get_usage().live == before.live);
  }
  for (int i = 0; i < HELD; i++) allred_arena_free(blocks[i]);
  allred_arena_thaw(); /* without a freeze: no effect */
  CHECK(*block == 7);
  allred_arena_free(block);
}

int main(int count, char **arguments) {
  if (count > 1) turns = atoi(arguments[1]);
  CHECK(sysconf(_SC_PAGESIZE) == (long)PAGE);
  CHECK(!allred_arena_allocate(1, 0) && !allred_arena_contains(&file) && !allred_arena_contains(NULL));
  file = memfd_create("arena", MFD_CLOEXEC);
  CHECK(file >= 0 && ftruncate(file, (off_t)(ARENA_BYTES + PAGE)) == 0);
  char *base = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)PAGE);
  CHECK(base != MAP_FAILED && allred_arena_open(file, PAGE, base, ARENA_BYTES) == 0);
  CHECK(allred_arena_base() == base && !allred_arena_contains(base + ARENA_BYTES) && !allred_arena_contains(base - 1));
  missing_pages();
  limit();
  merged_states();
  steps();
  threads();
  exhaustion();
  forks();
  freeze();
  printf("arena: %d turns of %d threads, forks and full memory checked\n", turns, THREADS);
}
