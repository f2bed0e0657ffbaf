/*
 * Threads are the ranks of several hosts: the ranks of a host share memory, hosts are connected by stream sockets with
 * small buffers. Every number of a result is checked.
 *
 *   network [OPERATIONS [SEED]]   so many operations in each case; a quarter with more than 5 hosts
 *
 * Kind, sizes, dtype, wire type and header of an operation follow from its number. Numbers are small integers, so that
 * a sum is exact in every order; where they are quantized it is close, and the same on all ranks. `number` of a rank
 * counts in the order of the hosts, `order` has the ranks as callers count them.
 */
#define _GNU_SOURCE /* usleep */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "encode.h"
#include "network.h"

#define MAX_HOSTS 13
#define MAX_TENSORS 6
#define CHUNK 32768
#define PATIENCE_NS ((int64_t)30 * 1000000000)

typedef struct {
  int hosts, ranks[MAX_HOSTS], slices;
  size_t window_bytes, recursive_bytes;
} layout;

static const layout layouts[] = {
    {2, {1, 1}, 1, 4096, 0},
    {2, {2, 2}, 2, 4096, 100000},
    {3, {1, 2, 3}, 1, 8192, 0},
    {3, {1, 1, 2}, 1, 4096, SIZE_MAX},
    {3, {3, 2, 2}, 2, 512, 0},
    {4, {1, 1, 1, 1}, 1, 4096, 0},
    {4, {1, 2, 1, 1}, 1, 4096, 60000},
    {5, {1, 1, 2, 1, 1}, 1, 65536, 100000},
    {2, {3, 3}, 3, 384, SIZE_MAX},
    {6, {1, 1, 1, 1, 1, 1}, 1, 8192, SIZE_MAX},
    {11, {1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1}, 1, 8192, SIZE_MAX},
    {13, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 1, 8192, 100000},
};

typedef struct {
  const layout *layout;
  int number, host, all, operations; /* number: among all ranks */
  uint64_t seed, digest;             /* digest: of the results of compressed allreduces */
  float residual[MAX_TENSORS * 40000];
  allred_segment segment;
  allred_network network;
  int first_rank[MAX_HOSTS + 1], sockets[MAX_HOSTS], order[64];
  uint64_t host_starts[MAX_HOSTS + 1];
  short events[MAX_HOSTS];
} rank;

static uint64_t draw(uint64_t seed, uint64_t a, uint64_t b) {
  return allred_mix(allred_mix(allred_mix(1, seed), a), b);
}

static void fail(const rank *me, int operation, const char *what, size_t where) {
  fprintf(stderr, "layout of %d hosts: rank %d, operation %d: %s (%zu)\n", me->layout->hosts, me->number, operation,
          what, where);
  _exit(1);
}

/* The element of a tensor on a rank, a small integer, as a number of this dtype. */
static void put(char *to, int dtype, size_t at, int value) {
  const float wide = (float)value;
  const double widest = value;
  const int32_t integer = value;
  if (dtype == ALLRED_FLOAT64)
    memcpy(to + 8 * at, &widest, 8);
  else if (dtype == ALLRED_FLOAT32)
    memcpy(to + 4 * at, &wide, 4);
  else if (dtype == ALLRED_INT32)
    memcpy(to + 4 * at, &integer, 4);
  else
    allred_narrow_kernel(0, ALLRED_FLOAT32, dtype)(to + 2 * at, &wide, 1);
}

static char *numbers(uint64_t seed, int dtype, size_t tensor, int of_rank, size_t count) {
  char *data = malloc(count * allred_dtype_bytes(dtype) + 1);
  for (size_t at = 0; at < count; at++)
    put(data, dtype, at, (int)(draw(seed, tensor * 64 + (uint64_t)of_rank, at) % 17) - 8);
  return data;
}

/* In a step, one rank has two samples and the next one none, if they differ: all weights are whole numbers. */
static uint64_t samples_of(int all, int rank, int differ, uint64_t seed) {
  const int two = (int)(draw(seed, 10, 0) % (uint64_t)all);
  if (!differ || all == 1) return 1;
  return rank == two ? 2 : rank == (two + 1) % all ? 0 : 1;
}

static int advance(rank *me, allred_operation *op, int number) {
  int status;
  for (uint64_t before = (uint64_t)-1;; before = op->progress_count) {
    while ((status = allred_run(op, 1000000)) == ALLRED_PENDING && op->progress_count != before)
      before = op->progress_count;
    if (status != ALLRED_PENDING) return status;
    const uint64_t dice = me->seed = allred_mix(me->seed, 1);
    if (dice % 8 == 0) usleep(50);
    for (int64_t waited = 0; op->progress_count == before && status == ALLRED_PENDING; waited += 1000000) {
      status = allred_run(op, 1000000);
      if (waited > PATIENCE_NS) fail(me, number, "no progress", (size_t)op->phase);
    }
    if (status != ALLRED_PENDING) return status;
  }
}

static const int dtypes[] = {ALLRED_FLOAT32, ALLRED_FLOAT64, ALLRED_INT32, ALLRED_FLOAT16, ALLRED_BFLOAT16};

static size_t some_count(uint64_t seed, uint64_t i) {
  const uint64_t size = draw(seed, 6, i) % 4;
  return 1 + draw(seed, 7, i) % (size == 0 ? 4 : size == 1 ? 300 : size == 2 ? 5000 : 40000);
}

/* A reducescatter or allgather, in place or not. Some ranks have no part; sometimes only one has: a broadcast. */
static void run_stream(rank *me, int number, uint64_t seed, int differs, int odd) {
  const int scatters = draw(seed, 11, 0) % 2 == 0, is_broadcast = draw(seed, 11, 1) % 4 == 0;
  const int root = (int)(draw(seed, 11, 2) % (uint64_t)me->all), in_place = is_broadcast || draw(seed, 11, 3) % 2;
  const int dtype = dtypes[draw(seed, 8, 0) % 5], own = me->order[me->number];
  const int op = draw(seed, 4, 0) % 3 == 0 ? ALLRED_MAX : dtype == ALLRED_INT32 ? ALLRED_SUM : ALLRED_AVERAGE;
  const size_t item = allred_dtype_bytes(dtype);
  allred_header header = {.kind = 1, .op = (uint8_t)op, .name = seed, .count = differs && me->number == odd};
  allred_operation operation;
  uint64_t starts[65] = {0};
  for (int rank = 0; rank < me->all; rank++) {
    const int has_part = is_broadcast ? rank == root : draw(seed, 12, (uint64_t)rank) % 4 > 0;
    starts[rank + 1] = starts[rank] + (has_part ? some_count(seed, (uint64_t)rank) * item : 0);
  }
  const size_t all = starts[me->all], begin = starts[own], part = starts[own + 1] - begin;
  char *ranks[64], *right = malloc(all + 1);
  for (int rank = 0; rank < me->all; rank++) ranks[rank] = numbers(seed, dtype, 0, rank, all / item);
  if (scatters)
    allred_reduce_kernel(0, dtype, op)(right, (const void *const *)ranks, me->all, all / item, me->all);
  else
    for (int rank = 0; rank < me->all; rank++)
      memcpy(right + starts[rank], ranks[rank] + starts[rank], starts[rank + 1] - starts[rank]);
  char *large = malloc(all + 1), *small = in_place ? large + begin : malloc(part + 1);
  memcpy(small, ranks[own] + begin, part);
  if (scatters) {
    memcpy(large, ranks[own], all);
    allred_begin_reducescatter(&operation, &me->segment, &header, large, small, starts, dtype, allred_variants() - 1,
                               op, me->all);
  } else {
    allred_begin_allgather(&operation, &me->segment, &header, small, large, starts);
  }
  const int status = advance(me, &operation, number), agreed = status == ALLRED_DONE;
  if (agreed == differs) fail(me, number, "wrong status", (size_t)status);
  const char *expected = agreed ? right : ranks[own];
  const char *result = scatters || !agreed ? small : large;
  const size_t from = scatters || !agreed ? begin : 0, bytes = scatters || !agreed ? part : all;
  for (size_t at = 0; at < bytes; at++)
    if (result[at] != expected[from + at]) fail(me, number, scatters ? "reducescatter" : "allgather", at);
  for (int rank = 0; rank < me->all; rank++) free(ranks[rank]);
  if (!in_place) free(small);
  free(large), free(right);
}

static double value(const char *from, int dtype, size_t at) {
  float wide;
  double widest;
  const void *source = from + allred_dtype_bytes(dtype) * at;
  if (dtype == ALLRED_FLOAT64) return memcpy(&widest, source, 8), widest;
  if (dtype == ALLRED_FLOAT32)
    memcpy(&wide, source, 4);
  else
    allred_wide_kernel(0, dtype, ALLRED_FLOAT32, ALLRED_SUM)(&wide, &source, 1, 1, 1);
  return wide;
}

/* The type in which tensor i of an operation travels. */
static int wire_of(uint64_t seed, int dtype, int is_sum, uint64_t i) {
  static const int wires[] = {ALLRED_FLOAT16, ALLRED_BFLOAT16, ALLRED_WIRE_INT8, ALLRED_WIRE_INT4};
  const int wire = draw(seed, 13, 0) % 2 ? wires[draw(seed, 13, 1) % 4] : 0;
  if (!wire || draw(seed, 13, 2 + i) % 4 == 0 || (allred_is_quantized(wire) && !is_sum)) return 0;
  return allred_encodes(dtype, wire) ? wire : 0;
}

/* Check a result of a compressed allreduce: all sums have at most 8 * `all` per number. */
static void check_close(rank *me, int number, int wire, const char *got, const char *right, int dtype, size_t count,
                        double weights) {
  const double steps = wire == ALLRED_WIRE_INT8 ? 127 : wire == ALLRED_WIRE_INT4 ? 7 : 256;
  for (size_t at = 0; at < count; at++) {
    const double error = value(got, dtype, at) - value(right, dtype, at);
    if (!(error < 17 * weights / steps && error > -17 * weights / steps)) fail(me, number, "too large an error", at);
  }
  for (size_t at = 0; at < count * allred_dtype_bytes(dtype); at++)
    me->digest = allred_mix(me->digest, (uint64_t)(unsigned char)got[at]);
}

static void check_headers(const rank *me, int number, int is_step, int uneven, uint64_t seed) {
  const allred_header *header;
  uint64_t count;
  int other = 0;
  for (int index = 0; (header = allred_header_run(&me->segment, (uint64_t)number, index, &count)); index++)
    for (; count; count--, other++)
      if (header->note != (is_step ? samples_of(me->all, other, uneven, seed) : (uint64_t)other))
        fail(me, number, "wrong header", (size_t)other);
  if (other != me->all) fail(me, number, "number of headers", (size_t)other);
}

static void *run(void *argument) {
  rank *me = argument;
  for (int number = 1; number <= me->operations; number++) {
    const uint64_t seed = draw(77, (uint64_t)number, (uint64_t)me->layout->hosts);
    const int differs = draw(seed, 1, 0) % 8 == 0, odd = (int)(draw(seed, 2, 0) % (uint64_t)me->all);
    if (draw(seed, 3, 1) % 2) {
      run_stream(me, number, seed, differs, odd);
      continue;
    }
    const int is_exchange = draw(seed, 3, 0) % 5 == 0;
    const int is_step = !is_exchange && draw(seed, 9, 0) % 3 == 0, uneven = is_step && draw(seed, 9, 1) % 3;
    const int op = is_step ? ALLRED_AVERAGE : draw(seed, 4, 0) % 3 == 0 ? ALLRED_MAX : ALLRED_SUM;
    const size_t count = is_exchange ? 0 : 1 + draw(seed, 5, 0) % MAX_TENSORS;
    allred_header header = {.kind = 1, .op = (uint8_t)op, .name = seed, .note = (uint64_t)me->number};
    if (is_step) {
      header.kind = ALLRED_KIND_STEP_ALLREDUCE;
      header.note = samples_of(me->all, me->number, uneven, seed);
    }
    if (differs && me->number == odd) header.count = 1;
    allred_operation operation;
    allred_tensor tensors[MAX_TENSORS];
    char *in[MAX_TENSORS];
    size_t counts[MAX_TENSORS];
    int kinds[MAX_TENSORS], wires[MAX_TENSORS];
    for (size_t i = 0; i < count; i++) {
      counts[i] = some_count(seed, i);
      if (differs && me->number == odd) counts[i] += 3; /* another size: nothing may be read or written */
      kinds[i] = dtypes[(draw(seed, 8, 0) + i / 3) % (is_step ? 2 : 5)];
      in[i] = numbers(seed, kinds[i], i, me->number, counts[i]);
      wires[i] = wire_of(seed, kinds[i], op != ALLRED_MAX, i);
      tensors[i] =
          (allred_tensor){in[i], in[i], counts[i] * allred_dtype_bytes(kinds[i]), kinds[i], wires[i], (uint32_t)i, 0};
    }
    if (is_exchange)
      allred_begin_exchange(&operation, &me->segment, &header);
    else
      allred_begin_allreduce(&operation, &me->segment, &header, tensors, count, allred_variants() - 1, op, me->all);
    if (draw(seed, 14, 0) % 2) {
      memset(me->residual, 0, sizeof me->residual);
      operation.residual = me->residual;
    }
    const int status = advance(me, &operation, number);
    if ((status == ALLRED_DIFFER) != (differs && me->all > 1)) fail(me, number, "wrong status", (size_t)status);
    check_headers(me, number, is_step, is_step && uneven, seed);
    for (size_t i = 0; i < count; i++) {
      char *all[64];
      for (int other = 0; other < me->all; other++) {
        all[other] = numbers(seed, kinds[i], i, other, counts[i]);
        if (!uneven || status == ALLRED_DIFFER) continue;
        char *plain = numbers(seed, kinds[i], i, other, counts[i]);
        allred_weigh(all[other], plain, counts[i] * allred_dtype_bytes(kinds[i]), kinds[i],
                     (double)samples_of(me->all, other, 1, seed));
        free(plain);
      }
      char *right = malloc(counts[i] * allred_dtype_bytes(kinds[i]));
      allred_reduce_kernel(0, kinds[i], op)(right, (const void *const *)all, me->all, counts[i], me->all);
      const char *expected = status == ALLRED_DIFFER ? all[me->number] : right;
      if (wires[i] && status != ALLRED_DIFFER)
        check_close(me, number, wires[i], in[i], right, kinds[i], counts[i], op == ALLRED_AVERAGE ? 1 : me->all);
      for (size_t at = 0; at < counts[i] * allred_dtype_bytes(kinds[i]); at++)
        if (in[i][at] != expected[at] && (!wires[i] || status == ALLRED_DIFFER)) fail(me, number, "wrong number", at);
      for (int other = 0; other < me->all; other++) free(all[other]);
      free(right), free(in[i]);
    }
  }
  if (me->network.lost) fail(me, 0, "connection lost", (size_t)me->network.lost);
  return NULL;
}

static void run_layout(const layout *l, int operations, uint64_t seed) {
  rank *ranks = calloc(64, sizeof *ranks);
  pthread_t threads[64];
  int all = 0, first[MAX_HOSTS + 1] = {0}, order[64];
  for (int host = 0; host < l->hosts; host++) first[host + 1] = all += l->ranks[host];
  for (int i = 0; i < all; i++) order[i] = i;
  for (int i = all - 1; i > 0; i--) { /* shuffled */
    const int other = (int)(draw(3, (uint64_t)all, (uint64_t)i) % (uint64_t)(i + 1)), kept = order[i];
    order[i] = order[other], order[other] = kept;
  }
  for (int host = 0; host < l->hosts; host++) {
    char *memory = aligned_alloc(4096, allred_segment_bytes(l->ranks[host], CHUNK));
    const size_t bytes = (allred_network_bytes(l->ranks[host], all, l->window_bytes) + 4095) / 4096 * 4096;
    char *shared = aligned_alloc(4096, bytes);
    memset(memory, 0, allred_segment_bytes(l->ranks[host], CHUNK));
    memset(shared, 0, bytes);
    for (int local = 0; local < l->ranks[host]; local++) {
      rank *me = &ranks[first[host] + local];
      *me = (rank){.layout = l, .number = first[host] + local, .host = host, .all = all, .operations = operations};
      me->seed = seed + (uint64_t)me->number;
      memcpy(me->first_rank, first, sizeof first);
      memcpy(me->order, order, sizeof order);
      me->network = (allred_network){.hosts = l->hosts, .host = host, .slices = l->slices};
      me->network.schedule = allred_make_schedule(l->hosts, host);
      me->network.recursive_bytes = l->recursive_bytes;
      me->network.first_rank = me->first_rank;
      me->network.order = me->order;
      me->network.host_starts = me->host_starts;
      me->network.events = me->events;
      me->network.sockets = local < l->slices ? me->sockets : NULL;
      me->network.memory = shared;
      me->network.window_bytes = l->window_bytes;
      me->network.message = malloc(allred_message_bytes(&me->network));
      me->network.received = malloc(allred_message_bytes(&me->network) * ALLRED_MAX_RADIX);
      me->network.moved = calloc(2 * (size_t)l->hosts, sizeof(size_t));
      me->network.scratch = malloc(ALLRED_SCRATCH_BYTES);
      me->network.compressed = malloc(allred_compressed_bytes(&me->network));
      me->segment = (allred_segment){.memory = memory, .rank = local, .ranks = l->ranks[host], .chunk_bytes = CHUNK};
      me->segment.across = &allred_across_hosts, me->segment.network = &me->network;
    }
  }
  for (int a = 0; a < l->hosts; a++)
    for (int b = a + 1; b < l->hosts; b++)
      for (int slice = 0; slice < l->slices; slice++) {
        int pair[2], small = 3000;
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair)) exit(2);
        for (int i = 0; i < 2; i++) setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
        ranks[first[a] + slice].sockets[b] = pair[0];
        ranks[first[b] + slice].sockets[a] = pair[1];
      }
  for (int i = 0; i < all; i++) pthread_create(&threads[i], NULL, run, &ranks[i]);
  for (int i = 0; i < all; i++) pthread_join(threads[i], NULL);
  for (int i = 1; i < all; i++)
    if (ranks[i].digest != ranks[0].digest) fail(&ranks[i], 0, "another result than rank 0", 0);
  for (int host = 0; host < l->hosts; host++)
    free(ranks[first[host]].segment.memory), free(ranks[first[host]].network.memory);
  for (int i = 0; i < all; i++) {
    for (int host = 0; ranks[i].network.sockets && host < l->hosts; host++)
      if (host != ranks[i].host) close(ranks[i].sockets[host]);
    free(ranks[i].network.message), free(ranks[i].network.received), free(ranks[i].network.moved);
    free(ranks[i].network.scratch), free(ranks[i].network.compressed);
  }
  free(ranks);
  printf("%d hosts, %d ranks, windows of %zu bytes: %d operations are right\n", l->hosts, all, l->window_bytes,
         operations);
}

int main(int count, char **words) {
  const int operations = count > 1 ? atoi(words[1]) : 100;
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
    run_layout(&layouts[i], layouts[i].hosts > 5 ? (operations + 3) / 4 : operations,
               count > 2 ? (uint64_t)atoll(words[2]) : 1);
  return 0;
}
