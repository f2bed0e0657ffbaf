/* The TCP connections of a rank (network.h). */
#define _GNU_SOURCE /* ppoll */
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include "chaos.h"
#include "network.h"

static size_t moved(allred_network *network, int host, ssize_t bytes, short event) {
  if (bytes > 0) return (size_t)bytes;
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
    network->events[host] |= event;
  else if (!network->lost)
    network->lost = 1 + host;
  return 0;
}

/* A call that a signal has interrupted. */
static size_t interrupted(allred_network *network, int host, short event) {
  errno = EINTR;
  return moved(network, host, -1, event);
}

size_t allred_send_some(allred_network *network, int host, const char *data, size_t bytes) {
  if (network->lost == 1 + host) return 0;
  if (CHAOS_FIRES()) return interrupted(network, host, POLLOUT);
  bytes = CHAOS_FEWER(bytes);
  return moved(network, host, send(network->sockets[host], data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL), POLLOUT);
}

size_t allred_receive_some(allred_network *network, int host, char *data, size_t bytes) {
  if (network->lost == 1 + host) return 0;
  if (CHAOS_FIRES()) return interrupted(network, host, POLLIN);
  bytes = CHAOS_FEWER(bytes);
  return moved(network, host, recv(network->sockets[host], data, bytes, MSG_DONTWAIT), POLLIN);
}

int allred_network_wait(const allred_segment *segment, int64_t limit_ns) {
  const allred_network *network = segment->network;
  struct pollfd polled[ALLRED_MAX_HOSTS];
  nfds_t count = 0;
  const struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
  for (int host = 0; network->sockets && host < network->hosts; host++) {
    if (!network->events[host]) continue;
    if (network->lost != 1 + host)
      polled[count++] = (struct pollfd){.fd = network->sockets[host], .events = network->events[host]};
    network->events[host] = 0;
  }
  if (!count) return 0;
  if (CHAOS_FIRES()) return 1; /* EINTR */
  ppoll(polled, count, &limit, NULL);
  return 1;
}
