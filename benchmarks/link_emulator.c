/*
 * Links with a rate and a latency between network namespaces, in user space: benchmarks/scaling.py builds and runs it.
 *
 *   link_emulator BITS_PER_S LATENCY_US NAMESPACE...
 *
 * It makes a TUN device `slow` in each namespace, and is the switch between them; a packet for address a.b.c.d belongs
 * to namespace d, counted from 1. A link carries one packet at a time in each direction at the rate, and the switch is
 * cut through: a packet passes the link of the sender and that of the receiver at the same time, then takes the
 * latency. No packet is dropped. Acknowledgements do not wait for data, as with the queues fq and fq_codel of a host: a
 * TUN device takes all that a connection may send, and else they would wait for it. It prints a line when the devices
 * exist, and ends at the end of its input.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HOSTS = 64, MAX_BYTES = 65536, AT_ONCE = 16 /* packets */, ACK_BYTES = 100 /* at most */ };

typedef struct packet {
  struct packet *next;
  double due_s; /* when it leaves the queue */
  int to;
  size_t bytes;
  char data[];
} packet;

typedef struct {
  packet *first, **end; /* in the order of due_s */
} queue;

typedef struct {
  double out_free_s, in_free_s; /* when the link has sent all packets so far, has received them */
  queue sent, data, acks;       /* not yet at the switch; from there to this host, twice */
} host_link;

static struct pollfd polled[MAX_HOSTS + 1]; /* the devices; then the input */
static host_link links[MAX_HOSTS];
static int hosts;
static double rate, latency_s; /* bytes per second */

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void check(int result, const char *what) {
  if (result >= 0) return;
  perror(what);
  exit(1);
}

static int open_device(const char *namespace) {
  char path[256];
  snprintf(path, sizeof path, "/run/netns/%s", namespace);
  const int space = open(path, O_RDONLY | O_CLOEXEC);
  check(space, path);
  check(setns(space, CLONE_NEWNET), "setns");
  close(space);
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  check(device, "/dev/net/tun");
  struct ifreq request = {.ifr_name = "slow", .ifr_flags = IFF_TUN | IFF_NO_PI};
  check(ioctl(device, TUNSETIFF, &request), "TUNSETIFF");
  return device;
}

static void append(queue *queue, packet *one, double due_s) {
  one->due_s = due_s;
  one->next = NULL;
  if (!queue->first) queue->end = &queue->first;
  *queue->end = one, queue->end = &one->next;
}

/* Return the first packet if it is due; else NULL, and when it is, if that is before *next_s. */
static packet *pop(queue *queue, double *next_s) {
  packet *one = queue->first;
  if (one && one->due_s > now_s()) {
    if (one->due_s < *next_s) *next_s = one->due_s;
    return NULL;
  }
  if (one) queue->first = one->next;
  return one;
}

/* Take a packet that a host has sent. */
static void take(int from, const char *data, size_t bytes) {
  const int to = (data[0] & 0xF0) == 0x40 && bytes >= 20 ? (unsigned char)data[19] - 1 : -1;
  if (to < 0 || to >= hosts || to == from) return; /* not IPv4, or broadcast */
  packet *one = malloc(sizeof *one + bytes);
  if (!one) exit(1);
  one->bytes = bytes, one->to = to;
  memcpy(one->data, data, bytes);
  const double now = now_s(), busy_s = (double)bytes / rate;
  host_link *link = &links[from];
  link->out_free_s = (link->out_free_s > now ? link->out_free_s : now) + busy_s;
  if (bytes <= ACK_BYTES)
    append(&links[to].acks, one, now + busy_s + latency_s);
  else
    append(&link->sent, one, link->out_free_s);
}

/* Move packets whose time has come. Return when the next one's will have, at most a second from now. */
static double move_packets(void) {
  double next_s = now_s() + 1;
  packet *one;
  for (int host = 0; host < hosts; host++)
    while ((one = pop(&links[host].sent, &next_s))) {
      host_link *to = &links[one->to];
      const double after = to->in_free_s + (double)one->bytes / rate;
      to->in_free_s = after > one->due_s ? after : one->due_s;
      append(&to->data, one, to->in_free_s + latency_s);
    }
  for (int host = 0; host < hosts; host++)
    while ((one = pop(&links[host].data, &next_s)) || (one = pop(&links[host].acks, &next_s))) {
      if (write(polled[host].fd, one->data, one->bytes) < 0 && errno != EIO && errno != EINVAL) check(-1, "write");
      free(one);
    }
  return next_s;
}

int main(int count, char **words) {
  static char data[MAX_BYTES];
  hosts = count - 3;
  if (hosts < 1 || hosts > MAX_HOSTS) return 2;
  rate = atof(words[1]) / 8, latency_s = atof(words[2]) * 1e-6;
  for (int host = 0; host < hosts; host++)
    polled[host] = (struct pollfd){.fd = open_device(words[3 + host]), .events = POLLIN};
  polled[hosts] = (struct pollfd){.fd = 0, .events = POLLIN};
  const struct sched_param high = {.sched_priority = 10};
  sched_setscheduler(0, SCHED_FIFO, &high); /* the ranks may use all cores */
  puts("ready");
  fflush(stdout);
  while (!polled[hosts].revents) {
    const double wait_s = move_packets() - now_s();
    const struct timespec limit = {wait_s > 0 ? (time_t)wait_s : 0,
                                   wait_s > 0 ? (long)(1e9 * (wait_s - (time_t)wait_s)) : 0};
    check(ppoll(polled, (nfds_t)hosts + 1, &limit, NULL), "ppoll");
    for (int host = 0; host < hosts; host++) {
      ssize_t bytes;
      for (int left = polled[host].revents ? AT_ONCE : 0;
           left && (bytes = read(polled[host].fd, data, sizeof data)) > 0; left--)
        take(host, data, (size_t)bytes);
    }
  }
  return 0;
}
