#include "network_schedule.h"

/* What a connection carries during the latency of one message: 2 Gbyte/s for 32 us. */
#define LATENCY_BYTES ((size_t)65536)

/* ---- members and levels */

/* Return the first host of a member; of `members`, the number of hosts. */
static int first_host(const allred_schedule *all, int member) {
  return member < all->folded ? 2 * member : member + all->folded;
}

static int member_of(const allred_schedule *all, int host) {
  return host < 2 * all->folded ? host / 2 : host - all->folded;
}

/* A folded pair has a host that acts for both, and one that does not act. */
static int is_paired(const allred_schedule *all, int host) { return host < 2 * all->folded; }

static int acts(const allred_schedule *all, int host) { return !is_paired(all, host) || host % 2 == 0; }

/* The part of a level that a member is in: its first member, and its place in the group. */
typedef struct {
  int first, place;
} part;

static part part_of(const allred_schedule *all, int level, int member) {
  const int number = member / all->stride[level];
  return (part){number * all->stride[level], number % all->radix[level]};
}

/* Return the first member of another part of the same group. */
static int other_part(const allred_schedule *all, int level, part own, int place) {
  return own.first + (place - own.place) * all->stride[level];
}

/* Return the host that acts for the counterpart of a member in another part. */
static int counterpart(const allred_schedule *all, int level, int member, int place) {
  const part own = part_of(all, level, member);
  return first_host(all, member - own.first + other_part(all, level, own, place));
}

static int split(int members, int *radix) {
  int levels = 0;
  for (int factor = 2; factor <= ALLRED_MAX_RADIX; factor++)
    for (; members % factor == 0; members /= factor) radix[levels++] = factor;
  return members == 1 ? levels : 0;
}

/* ---- windows */

static void append(allred_schedule *all, allred_exchange_step step) { all->steps[all->step_count++] = step; }

/* A folded pair exchanges all blocks. */
static void append_fold(allred_schedule *all, int to_first) {
  const int is_first = all->host % 2 == 0, other = is_first ? all->host + 1 : all->host - 1;
  const int receives = is_first == to_first, end = receives ? 0 : all->hosts, received_end = receives ? all->hosts : 0;
  append(all, (allred_exchange_step){other, other, 0, end, 0, received_end, all->step_count, 0,
                                     to_first ? ALLRED_ADD : ALLRED_COPY});
}

static void append_level(allred_schedule *all, int level, int reduces) {
  const int member = member_of(all, all->host), radix = all->radix[level], begun = all->step_count;
  const part own = part_of(all, level, member);
  for (int distance = 1; distance < radix; distance++) {
    const int to = (own.place + distance) % radix, from = (own.place + radix - distance) % radix;
    const int sent = other_part(all, level, own, reduces ? to : own.place);
    const int received = other_part(all, level, own, reduces ? own.place : from), stride = all->stride[level];
    const int is_last = level == 0 && distance == radix - 1;
    append(all, (allred_exchange_step){counterpart(all, level, member, to), counterpart(all, level, member, from),
                                       first_host(all, sent), first_host(all, sent + stride), first_host(all, received),
                                       first_host(all, received + stride), begun, 0,
                                       !reduces  ? ALLRED_COPY
                                       : is_last ? ALLRED_ADD_LAST
                                                 : ALLRED_ADD});
  }
}

allred_schedule allred_make_schedule(int hosts, int host) {
  allred_schedule all = {.hosts = hosts, .host = host, .members = hosts};
  while (!(all.levels = split(all.members, all.radix))) all.members--;
  all.folded = hosts - all.members;
  for (int level = 0, stride = 1; level < all.levels; stride *= all.radix[level++]) all.stride[level] = stride;
  if (is_paired(&all, host)) append_fold(&all, 1);
  for (int level = all.levels - 1; level >= 0 && acts(&all, host); level--) append_level(&all, level, 1);
  for (int level = 0; level < all.levels && acts(&all, host); level++) append_level(&all, level, 0);
  if (is_paired(&all, host)) append_fold(&all, 0);
  return all;
}

size_t allred_recursive_bytes(const allred_schedule *all) {
  const int saved = all->hosts - 1 - all->levels - (all->folded > 0);
  return saved > 0 ? LATENCY_BYTES * (size_t)saved >> (all->folded > 0) : 0;
}

allred_exchange_step allred_ring_step(const allred_schedule *all, int step) {
  const int hosts = all->hosts, sent = (all->host + 2 * hosts - 1 - step) % hosts;
  const int received = (sent + hosts - 1) % hosts;
  return (allred_exchange_step){(all->host + 1) % hosts,
                                (all->host + hosts - 1) % hosts,
                                sent,
                                sent + 1,
                                received,
                                received + 1,
                                step ? step - 1 : 0,
                                step > 0,
                                step > hosts - 2    ? ALLRED_COPY
                                : step == hosts - 2 ? ALLRED_ADD_LAST
                                                    : ALLRED_ADD};
}

/* ---- messages */

int allred_largest_radix(const allred_schedule *all) { return all->radix[all->levels - 1]; }

int allred_message_rounds(const allred_schedule *all) { return all->levels + (all->folded ? 2 : 0); }

/* Return the level of a round, -1 before the first, `levels` behind the last. */
static int level_of(const allred_schedule *all, int round) { return round - (all->folded ? 1 : 0); }

allred_message_round allred_round_of_messages(const allred_schedule *all, int round) {
  const int level = level_of(all, round), host = all->host, is_first = host % 2 == 0;
  if (level < 0 || level == all->levels) {
    if (!is_paired(all, host)) return (allred_message_round){0};
    const int receives = is_first == (level < 0);
    if (is_first) return (allred_message_round){2, {host, host + 1}, !receives, receives};
    return (allred_message_round){1, {host - 1}, !receives, receives};
  }
  if (!acts(all, host)) return (allred_message_round){0};
  allred_message_round found = {all->radix[level], {0}, 1, 1};
  for (int place = 0; place < found.count; place++)
    found.hosts[place] = counterpart(all, level, member_of(all, host), place);
  return found;
}

int allred_completes_sum(const allred_schedule *all, int round) { return level_of(all, round) == all->levels - 1; }

allred_host_range allred_hosts_in_message(const allred_schedule *all, int host, int round) {
  const int level = level_of(all, round), member = member_of(all, host);
  if (level < 0) return (allred_host_range){host, host + 1};
  if (level == all->levels) return (allred_host_range){0, all->hosts};
  const int first = part_of(all, level, member).first;
  return (allred_host_range){first_host(all, first), first_host(all, first + all->stride[level])};
}
