/* The connections of a Segment to other hosts (network.h). */
#include <string.h>

#include "network.h"
#include "segment_object.h"

/* What set_network() allocates. */
typedef struct {
  allred_network network;
  Py_buffer memory;
  int first_rank[ALLRED_MAX_HOSTS + 1], sockets[ALLRED_MAX_HOSTS];
  short events[ALLRED_MAX_HOSTS];
  int *order;
} held_network;

void allred_segment_release_network(Segment *self) {
  held_network *held = (held_network *)(void *)self->segment.network;
  self->segment.across = NULL, self->segment.network = NULL;
  if (!held) return;
  if (held->memory.obj) PyBuffer_Release(&held->memory);
  PyMem_Free(held->network.message), PyMem_Free(held->network.received);
  PyMem_Free(held->network.moved), PyMem_Free(held->network.scratch), PyMem_Free(held->network.host_starts);
  PyMem_Free(held->network.compressed);
  PyMem_Free(held->order);
  PyMem_Free(held);
}

/* Read a list of `count` numbers from `least` to `most`; 0 with an exception set. */
static int read_numbers(PyObject *list, Py_ssize_t count, long long least, long long most, long long *to) {
  if (!PyList_Check(list) || PyList_Size(list) != count)
    return PyErr_Format(PyExc_ValueError, "expected a list of %zd numbers", count), 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    to[i] = PyLong_AsLongLong(PyList_GetItem(list, i));
    if (PyErr_Occurred()) return 0;
    if (to[i] < least || to[i] > most) return PyErr_Format(PyExc_ValueError, "%lld is out of range", to[i]), 0;
  }
  return 1;
}

static int allocate(allred_network *network) {
  const size_t message = allred_message_bytes(network), hosts = (size_t)network->hosts;
  network->message = PyMem_Malloc(message);
  network->received = PyMem_Malloc(message * ALLRED_MAX_RADIX);
  network->moved = PyMem_Calloc(2 * hosts, sizeof *network->moved);
  network->scratch = PyMem_Malloc(ALLRED_SCRATCH_BYTES);
  network->host_starts = PyMem_Calloc(hosts + 1, sizeof *network->host_starts);
  network->compressed = network->sockets ? PyMem_Malloc(allred_compressed_bytes(network)) : NULL;
  return network->message && network->received && network->moved && network->scratch && network->host_starts &&
         (network->compressed || !network->sockets);
}

/* Read the ranks of each host, a list of lists: `order` and the prefix sums `first_rank`; 0 with an exception set. */
static int read_hosts(held_network *held, PyObject *lists, Py_ssize_t hosts, int slices) {
  for (Py_ssize_t host = 0; host < hosts; host++) {
    PyObject *ranks = PyList_GetItem(lists, host);
    const Py_ssize_t count = PyList_Check(ranks) ? PyList_Size(ranks) : -1;
    if (count < slices || count > ALLRED_MAX_RANKS)
      return PyErr_Format(PyExc_ValueError, "expected lists of %d to %d ranks", slices, ALLRED_MAX_RANKS), 0;
    held->first_rank[host + 1] = held->first_rank[host] + (int)count;
  }
  const int all = held->first_rank[hosts];
  char *seen = PyMem_Calloc((size_t)all, 1);
  held->order = PyMem_Calloc((size_t)all, sizeof *held->order);
  if (!held->order || !seen) PyErr_NoMemory();
  for (Py_ssize_t host = 0; host < hosts && !PyErr_Occurred(); host++)
    for (int at = held->first_rank[host]; at < held->first_rank[host + 1] && !PyErr_Occurred(); at++) {
      const long rank = PyLong_AsLong(PyList_GetItem(PyList_GetItem(lists, host), at - held->first_rank[host]));
      if (PyErr_Occurred()) break;
      if (rank < 0 || rank >= all || seen[rank]++) PyErr_Format(PyExc_ValueError, "rank %ld is not expected", rank);
      held->order[at] = (int)rank;
    }
  PyMem_Free(seen);
  return !PyErr_Occurred();
}

PyObject *allred_segment_set_network(Segment *self, PyObject *args) {
  PyObject *memory, *lists, *sockets;
  Py_ssize_t window_bytes;
  int host, slices;
  long long fds[ALLRED_MAX_HOSTS];
  if (!PyArg_ParseTuple(args, "OniiOO:set_network", &memory, &window_bytes, &host, &slices, &lists, &sockets))
    return NULL;
  const Py_ssize_t hosts = PyList_Check(lists) ? PyList_Size(lists) : 0;
  if (!self->open || self->segment.network || !allred_queue_idle(&self->queue))
    return PyErr_Format(PyExc_ValueError, "the segment is closed, in use, or has a network");
  if (hosts < 2 || hosts > ALLRED_MAX_HOSTS || host < 0 || host >= hosts || slices < 1 ||
      window_bytes < (Py_ssize_t)allred_least_window_bytes((int)hosts) || window_bytes % ALLRED_LINE)
    return PyErr_Format(PyExc_ValueError, "no such hosts, host, slices or window_bytes");
  if (!read_numbers(sockets, hosts, -1, INT_MAX, fds)) return NULL;
  held_network *held = PyMem_Calloc(1, sizeof *held);
  if (!held) return PyErr_NoMemory();
  allred_network *network = &held->network;
  self->segment.network = network;
  for (Py_ssize_t i = 0; i < hosts; i++) held->sockets[i] = (int)fds[i];
  if (!read_hosts(held, lists, hosts, slices)) return allred_segment_release_network(self), NULL;
  *network = (allred_network){.hosts = (int)hosts, .host = host, .slices = slices, .first_rank = held->first_rank};
  network->schedule = allred_make_schedule((int)hosts, host);
  network->recursive_bytes = allred_recursive_limit_bytes(&network->schedule);
  network->order = held->order;
  network->sockets = self->segment.rank < slices ? held->sockets : NULL;
  network->events = held->events;
  network->window_bytes = (size_t)window_bytes;
  if (held->first_rank[host + 1] - held->first_rank[host] != self->segment.ranks) {
    PyErr_Format(PyExc_ValueError, "this host has other ranks");
    return allred_segment_release_network(self), NULL;
  }
  if (PyObject_GetBuffer(memory, &held->memory, PyBUF_CONTIG) < 0) return allred_segment_release_network(self), NULL;
  network->memory = held->memory.buf;
  const size_t needed = allred_network_bytes(self->segment.ranks, held->first_rank[hosts], network->window_bytes);
  if ((size_t)held->memory.len < needed) {
    PyErr_Format(PyExc_ValueError, "the memory has %zd bytes, not %zu", held->memory.len, needed);
    return allred_segment_release_network(self), NULL;
  }
  if (!allocate(network)) return allred_segment_release_network(self), PyErr_NoMemory();
  self->segment.across = &allred_across_hosts;
  Py_RETURN_NONE;
}

int allred_all_ranks(const Segment *self) {
  const allred_network *network = self->segment.network;
  return network ? network->first_rank[network->hosts] : self->segment.ranks;
}

int allred_own_rank(const Segment *self) {
  const allred_network *network = self->segment.network;
  return network ? network->order[network->first_rank[network->host] + self->segment.rank] : self->segment.rank;
}

PyObject *allred_segment_get_lost_host(Segment *self, void *unused) {
  const allred_network *network = self->segment.network;
  return PyLong_FromLong(network ? network->lost - 1 : -1);
}

PyObject *allred_python_network_bytes(PyObject *module, PyObject *args) {
  int local_ranks, ranks;
  Py_ssize_t window_bytes;
  if (!PyArg_ParseTuple(args, "iin:network_bytes", &local_ranks, &ranks, &window_bytes)) return NULL;
  if (local_ranks < 1 || ranks < local_ranks || window_bytes < 1)
    return PyErr_Format(PyExc_ValueError, "ranks and window_bytes must be positive");
  return PyLong_FromSize_t(allred_network_bytes(local_ranks, ranks, (size_t)window_bytes));
}

/* Read where the parts of all hosts lie in a buffer, as (start, bytes) of each; 0 with an exception set. */
static int read_parts(PyObject *starts, PyObject *counts, Py_ssize_t hosts, const Py_buffer *view, uint64_t **parts) {
  long long start[ALLRED_MAX_HOSTS], bytes[ALLRED_MAX_HOSTS];
  if (!read_numbers(starts, hosts, 0, view->len, start) || !read_numbers(counts, hosts, 0, view->len, bytes)) return 0;
  uint64_t *table = PyMem_Realloc(*parts, 2 * (size_t)hosts * sizeof **parts);
  if (!table) return PyErr_NoMemory(), 0;
  *parts = table;
  for (Py_ssize_t host = 0; host < hosts; host++) {
    if (start[host] + bytes[host] > view->len)
      return PyErr_Format(PyExc_ValueError, "a part ends behind the buffer"), 0;
    table[2 * host] = (uint64_t)start[host], table[2 * host + 1] = (uint64_t)bytes[host];
  }
  return 1;
}

PyObject *allred_segment_begin_host_exchange(Segment *self, PyObject *args) {
  PyObject *send, *receive, *send_starts, *send_counts, *receive_starts, *receive_counts;
  if (!PyArg_ParseTuple(args, "OOOOOO:begin_host_exchange", &send, &send_starts, &send_counts, &receive,
                        &receive_starts, &receive_counts))
    return NULL;
  Operation *operation = allred_segment_prepare(self, Py_None, 1);
  if (!operation) return NULL;
  const Py_ssize_t hosts = self->segment.network ? self->segment.network->hosts : 0;
  const Py_buffer *from, *to;
  const int prepared = (from = allred_hold(operation, send, PyBUF_CONTIG_RO)) &&
                       (to = allred_hold(operation, receive, PyBUF_CONTIG)) &&
                       read_parts(send_starts, send_counts, hosts, from, &operation->send_starts) &&
                       read_parts(receive_starts, receive_counts, hosts, to, &operation->receive_starts);
  if (prepared)
    allred_begin_host_exchange(&operation->operation, &self->segment, from->buf, to->buf, operation->send_starts,
                               operation->receive_starts);
  return allred_segment_begin(self, operation, Py_None, prepared);
}
