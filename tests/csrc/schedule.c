/*
 * The schedules of 2 to 130, and of more hosts (network_schedule.h), without a network: one thread takes the steps of
 * all hosts, and a message is a copy of the sums of its blocks.
 *
 * Every block must end as the sum of all hosts, on all hosts; the headers in a message must be of consecutive hosts, in
 * order; and the number of messages of a host must grow with the logarithm of the hosts only.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "network_schedule.h"

typedef struct message {
  struct message *next;
  int count;
  long sums[];
} message;

typedef struct {
  allred_schedule schedule;
  int sent, received; /* steps */
  long *sums;         /* of each block */
} host;

static int hosts;

static void fail(const char *what, int number) {
  fprintf(stderr, "%d hosts: %s (%d)\n", hosts, what, number);
  exit(1);
}

static allred_exchange_step step_of(const host *me, int is_ring, int step) {
  return is_ring ? allred_ring_step(&me->schedule, step) : me->schedule.steps[step];
}

static int count_of(const host *me, int is_ring) { return is_ring ? 2 * (hosts - 1) : me->schedule.step_count; }

static int send_one(host *me, int is_ring, message **queues) {
  if (me->sent == count_of(me, is_ring)) return 0;
  const allred_exchange_step step = step_of(me, is_ring, me->sent);
  if (me->received < step.needs + step.forwards) return 0;
  const int count = step.sent_end - step.sent;
  me->sent++;
  if (!count) return 1;
  message **last = &queues[me->schedule.host * hosts + step.to];
  while (*last) last = &(*last)->next;
  *last = malloc(sizeof(message) + (size_t)count * sizeof(long));
  (*last)->next = NULL, (*last)->count = count;
  memcpy((*last)->sums, me->sums + step.sent, (size_t)count * sizeof(long));
  return 1;
}

static int receive_one(host *me, int is_ring, message **queues) {
  if (me->received == count_of(me, is_ring)) return 0;
  const allred_exchange_step step = step_of(me, is_ring, me->received);
  const int count = step.received_end - step.received;
  if (count) {
    message **first = &queues[step.from * hosts + me->schedule.host], *got = *first;
    if (!got) return 0;
    if (got->count != count) fail("a message has other blocks than its receiver expects", me->schedule.host);
    for (int i = 0; i < count; i++) {
      long *sum = &me->sums[step.received + i];
      *sum = step.action == ALLRED_COPY ? got->sums[i] : *sum + got->sums[i];
    }
    *first = got->next;
    free(got);
  }
  me->received++;
  return 1;
}

static long first_value(int number, int block) { return number * 31L + block * 7L + 1; }

static void check_windows(host *all, int is_ring) {
  message **queues = calloc((size_t)hosts * (size_t)hosts, sizeof *queues);
  int any, most = 0;
  for (int i = 0; i < hosts; i++) {
    all[i].sent = all[i].received = 0;
    for (int block = 0; block < hosts; block++) all[i].sums[block] = first_value(i, block);
  }
  do {
    any = 0;
    for (int i = 0; i < hosts; i++) any |= send_one(&all[i], is_ring, queues) | receive_one(&all[i], is_ring, queues);
  } while (any);
  for (int i = 0; i < hosts; i++) {
    if (all[i].sent != count_of(&all[i], is_ring) || all[i].received != all[i].sent) fail("a host waits", i);
    if (all[i].sent > most) most = all[i].sent;
    for (int block = 0; block < hosts; block++) {
      long sum = 0;
      for (int other = 0; other < hosts; other++) sum += first_value(other, block);
      if (all[i].sums[block] != sum) fail("wrong sum", i);
    }
  }
  if (!is_ring && most > ALLRED_MAX_STEPS) fail("too many steps", most);
  free(queues);
}

static int log2_of(int number) {
  int bits = 0;
  while (number >>= 1) bits++;
  return bits;
}

static void check_messages(host *all) {
  const int rounds = allred_message_round_count(&all->schedule);
  int completed = 0, *sent = calloc((size_t)hosts, sizeof *sent);
  allred_host_range *have = calloc((size_t)hosts, sizeof *have), *next = calloc((size_t)hosts, sizeof *next);
  for (int i = 0; i < hosts; i++) have[i] = (allred_host_range){i, i + 1};
  for (int round = 0; round < rounds; round++) {
    completed += allred_completes_sum(&all->schedule, round);
    for (int i = 0; i < hosts; i++) {
      const allred_message_round peers = allred_make_message_round(&all[i].schedule, round);
      next[i] = have[i];
      for (int place = 0; place < peers.count; place++) {
        const int peer = peers.hosts[place];
        const allred_host_range said = allred_hosts_in_message(&all[i].schedule, peer, round);
        sent[i] += peers.sends && peer != i;
        if (!peers.receives) continue;
        if (said.first != have[peer].first || said.end != have[peer].end) fail("a message of other hosts", peer);
        if (place && next[i].end != said.first) fail("hosts are not in order", i);
        if (!place) next[i].first = said.first;
        next[i].end = said.end;
        if (peer != i && !allred_make_message_round(&all[peer].schedule, round).sends) fail("a host is silent", peer);
      }
    }
    memcpy(have, next, (size_t)hosts * sizeof *have);
  }
  for (int i = 0; i < hosts; i++) {
    if (have[i].first != 0 || have[i].end != hosts) fail("headers are missing", i);
    if (sent[i] > 2 * log2_of(hosts) + 4) fail("too many messages", sent[i]);
  }
  if (completed != 1) fail("rounds that complete the sum", completed);
  free(sent), free(have), free(next);
}

static void check(int number) {
  host *all = calloc((size_t)(hosts = number), sizeof *all);
  for (int i = 0; i < hosts; i++) {
    all[i].schedule = allred_make_schedule(hosts, i);
    all[i].sums = calloc((size_t)hosts, sizeof(long));
  }
  check_messages(all);
  check_windows(all, 0);
  if (hosts < 40) check_windows(all, 1);
  for (int i = 0; i < hosts; i++) free(all[i].sums);
  free(all);
}

int main(void) {
  static const int more[] = {255, 256, 257, 343, 511};
  for (int number = 2; number <= 130; number++) check(number);
  for (size_t i = 0; i < sizeof more / sizeof *more; i++) check(more[i]);
  printf("the schedules of 2 to 130, and of 255, 256, 257, 343 and 511 hosts are right\n");
  return 0;
}
