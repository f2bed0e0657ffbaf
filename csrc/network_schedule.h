/*
 * Who exchanges what with whom, in which order: the rounds of messages, and the steps of windows.
 *
 * Recursive exchanges: `members` is the largest number of hosts whose prime factors are 2, 3, 5 and 7; its factors are
 * the levels. If there are more hosts, hosts 2i and 2i + 1 are one member for i < `folded`: host 2i + 1 first gives its
 * data to host 2i, which acts for both, and at the end receives the result. With 2, 3 and 8 hosts no host is folded,
 * with 11 hosts one is.
 *
 * At a level, groups of `radix` neighboring parts exchange data, each member with its counterparts in the other parts.
 * A part has `stride` members: 1 at level 0, and at each further level a whole group of the level before.
 *
 *   messages   from level 0 to the last: then each member has the headers and the sum of all members of its group
 *   windows    from the last level to 0, each member sends what it has of each other part to its counterpart there, and
 *              adds what it receives to its own part: at the end each member has the sum of its own block. From level 0
 *              to the last, members exchange complete parts
 *
 * In the ring, a host sends to the next host in each step, and receives from the previous one.
 */
#ifndef ALLRED_NETWORK_SCHEDULE_H
#define ALLRED_NETWORK_SCHEDULE_H

#include <stddef.h>

#define ALLRED_MAX_HOSTS 1024
#define ALLRED_MAX_RADIX 7
#define ALLRED_MAX_LEVELS 10
#define ALLRED_MAX_STEPS 48 /* of a recursive exchange */

/* A step of windows: this host sends some blocks to one host, and receives some from one. */
typedef struct {
  int to, from;               /* hosts */
  int sent, sent_end;         /* blocks of hosts; none are sent if both are equal */
  int received, received_end; /* likewise */
  int needs;                  /* the number of steps that it must have received before */
  int forwards;               /* it sends what the next step receives, each byte when it has arrived */
  enum { ALLRED_COPY, ALLRED_ADD, ALLRED_ADD_LAST } action; /* for what it receives; the last one completes the sum */
} allred_exchange_step;

typedef struct {
  int hosts, host;
  int members, folded, levels, radix[ALLRED_MAX_LEVELS], stride[ALLRED_MAX_LEVELS];
  int step_count;
  allred_exchange_step steps[ALLRED_MAX_STEPS]; /* of a recursive allreduce */
} allred_schedule;

allred_schedule allred_make_schedule(int hosts, int host);

/*
 * Return the largest slice of a window, in bytes, for which the recursive allreduce is taken to be faster than the
 * ring. With latency a, bandwidth b and n bytes, the ring takes the longer of 2 (hosts - 1) a and 2 n / b, because it
 * sends a byte as soon as it has arrived; the recursive one takes 2 levels a + 2 n / b. So it is faster up to (hosts -
 * 1 - levels) a b. With folded hosts it takes 2 (a + n / b) more, so the limit is (hosts - 2 - levels) a b / 2. a b is
 * a constant, because all hosts must choose the same.
 */
size_t allred_recursive_limit_bytes(const allred_schedule *schedule);

/* Return a step of the ring. Steps 0 to hosts - 2 reduce; as many further steps gather. */
allred_exchange_step allred_ring_step(const allred_schedule *schedule, int step);

/* A round of messages. hosts: whose messages are merged, in ascending order; this host is one of them if it keeps its
 * own. sends, receives: whether this host sends its message to the others, and receives from them. */
typedef struct {
  int count, hosts[ALLRED_MAX_RADIX], sends, receives;
} allred_message_round;

int allred_largest_radix(const allred_schedule *schedule);
int allred_message_round_count(const allred_schedule *schedule);
allred_message_round allred_make_message_round(const allred_schedule *schedule, int round);

/* Whether the sum is complete after the round. */
int allred_completes_sum(const allred_schedule *schedule, int round);

/* The hosts whose headers are in the message of a host in a round: from `first` up to, not including, `end`. */
typedef struct {
  int first, end;
} allred_host_range;

allred_host_range allred_hosts_in_message(const allred_schedule *schedule, int host, int round);

#endif
