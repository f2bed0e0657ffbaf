#include "network_schedule.h"

/* The assumed product of bandwidth and latency of a connection, such as 2 GB/s and 32 us. It is not measured. */
#define LATENCY_BYTES ((size_t)65536)

/* ---- members and levels */

/* Return the first host of a member; of `members`, the number of hosts. */
static int first_host(const allred_schedule *schedule, int member) {
  return member < schedule->folded ? 2 * member : member + schedule->folded;
}

static int member_of(const allred_schedule *schedule, int host) {
  return host < 2 * schedule->folded ? host / 2 : host - schedule->folded;
}

/* Of a folded pair, the first host is active, for both. */
static int is_paired(const allred_schedule *schedule, int host) { return host < 2 * schedule->folded; }

static int is_active(const allred_schedule *schedule, int host) { return !is_paired(schedule, host) || host % 2 == 0; }

/* The position of a member at a level: the first member of its part, and the place of the part in the group. */
typedef struct {
  int first, place;
} group_position;

static group_position position_in_group(const allred_schedule *schedule, int level, int member) {
  const int number = member / schedule->stride[level];
  return (group_position){number * schedule->stride[level], number % schedule->radix[level]};
}

/* Return the first member of another part of the same group. */
static int other_part(const allred_schedule *schedule, int level, group_position own, int place) {
  return own.first + (place - own.place) * schedule->stride[level];
}

/* Return the active host of the counterpart of a member in another part. */
static int counterpart(const allred_schedule *schedule, int level, int member, int place) {
  const group_position own = position_in_group(schedule, level, member);
  return first_host(schedule, member - own.first + other_part(schedule, level, own, place));
}

static int factorize(int members, int *radix) {
  int levels = 0;
  for (int factor = 2; factor <= ALLRED_MAX_RADIX; factor++)
    for (; members % factor == 0; members /= factor) radix[levels++] = factor;
  return members == 1 ? levels : 0;
}

/* ---- windows */

static void append(allred_schedule *schedule, allred_exchange_step step) {
  schedule->steps[schedule->step_count++] = step;
}

/* A folded pair exchanges all blocks. */
static void append_fold(allred_schedule *schedule, int to_first) {
  const int is_first = schedule->host % 2 == 0, other = is_first ? schedule->host + 1 : schedule->host - 1;
  const int receives = is_first == to_first, end = receives ? 0 : schedule->hosts,
            received_end = receives ? schedule->hosts : 0;
  append(schedule, (allred_exchange_step){other, other, 0, end, 0, received_end, schedule->step_count, 0,
                                          to_first ? ALLRED_ADD : ALLRED_COPY});
}

static void append_level(allred_schedule *schedule, int level, int reduces) {
  const int member = member_of(schedule, schedule->host), radix = schedule->radix[level], begun = schedule->step_count;
  const group_position own = position_in_group(schedule, level, member);
  for (int distance = 1; distance < radix; distance++) {
    const int to = (own.place + distance) % radix, from = (own.place + radix - distance) % radix;
    const int sent = other_part(schedule, level, own, reduces ? to : own.place);
    const int received = other_part(schedule, level, own, reduces ? own.place : from), stride = schedule->stride[level];
    const int is_last = level == 0 && distance == radix - 1;
    append(schedule,
           (allred_exchange_step){counterpart(schedule, level, member, to), counterpart(schedule, level, member, from),
                                  first_host(schedule, sent), first_host(schedule, sent + stride),
                                  first_host(schedule, received), first_host(schedule, received + stride), begun, 0,
                                  !reduces  ? ALLRED_COPY
                                  : is_last ? ALLRED_ADD_LAST
                                            : ALLRED_ADD});
  }
}

allred_schedule allred_make_schedule(int hosts, int host) {
  allred_schedule schedule = {.hosts = hosts, .host = host, .members = hosts};
  while (!(schedule.levels = factorize(schedule.members, schedule.radix))) schedule.members--;
  schedule.folded = hosts - schedule.members;
  for (int level = 0, stride = 1; level < schedule.levels; stride *= schedule.radix[level++])
    schedule.stride[level] = stride;
  if (is_paired(&schedule, host)) append_fold(&schedule, 1);
  for (int level = schedule.levels - 1; level >= 0 && is_active(&schedule, host); level--)
    append_level(&schedule, level, 1);
  for (int level = 0; level < schedule.levels && is_active(&schedule, host); level++) append_level(&schedule, level, 0);
  if (is_paired(&schedule, host)) append_fold(&schedule, 0);
  return schedule;
}

size_t allred_recursive_limit_bytes(const allred_schedule *schedule) {
  const int steps_saved = schedule->hosts - 1 - schedule->levels - (schedule->folded > 0);
  return steps_saved > 0 ? LATENCY_BYTES * (size_t)steps_saved >> (schedule->folded > 0) : 0;
}

allred_exchange_step allred_ring_step(const allred_schedule *schedule, int step) {
  const int hosts = schedule->hosts, sent = (schedule->host + 2 * hosts - 1 - step) % hosts;
  const int received = (sent + hosts - 1) % hosts;
  return (allred_exchange_step){(schedule->host + 1) % hosts,
                                (schedule->host + hosts - 1) % hosts,
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

int allred_largest_radix(const allred_schedule *schedule) { return schedule->radix[schedule->levels - 1]; }

int allred_message_round_count(const allred_schedule *schedule) {
  return schedule->levels + (schedule->folded ? 2 : 0);
}

/* Return the level of a round, -1 before the first, `levels` behind the last. */
static int level_of(const allred_schedule *schedule, int round) { return round - (schedule->folded ? 1 : 0); }

allred_message_round allred_make_message_round(const allred_schedule *schedule, int round) {
  const int level = level_of(schedule, round), host = schedule->host, is_first = host % 2 == 0;
  if (level < 0 || level == schedule->levels) {
    if (!is_paired(schedule, host)) return (allred_message_round){0};
    const int receives = is_first == (level < 0);
    if (is_first) return (allred_message_round){2, {host, host + 1}, !receives, receives};
    return (allred_message_round){1, {host - 1}, !receives, receives};
  }
  if (!is_active(schedule, host)) return (allred_message_round){0};
  allred_message_round found = {schedule->radix[level], {0}, 1, 1};
  for (int place = 0; place < found.count; place++)
    found.hosts[place] = counterpart(schedule, level, member_of(schedule, host), place);
  return found;
}

int allred_completes_sum(const allred_schedule *schedule, int round) {
  return level_of(schedule, round) == schedule->levels - 1;
}

allred_host_range allred_hosts_in_message(const allred_schedule *schedule, int host, int round) {
  const int level = level_of(schedule, round), member = member_of(schedule, host);
  if (level < 0) return (allred_host_range){host, host + 1};
  if (level == schedule->levels) return (allred_host_range){0, schedule->hosts};
  const int first = position_in_group(schedule, level, member).first;
  return (allred_host_range){first_host(schedule, first), first_host(schedule, first + schedule->stride[level])};
}
