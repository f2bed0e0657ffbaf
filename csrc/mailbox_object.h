/*
 * The Python type `Mailbox`, one end of a link between a worker and a parameter server (mailbox.h), as its three files
 * see it. Limited API.
 *
 *   mailbox_worker.c   begin(), done(), linger() and `reply`, of a worker
 *   mailbox_server.c   wait_any(), poll(), cell(), take(), give() and answer(), of a server
 *   mailbox_type.c     the type: how an end is made and closed
 *
 * Sizes are checked in these, completely, before the C below works with them.
 */
#ifndef ALLRED_MAILBOX_OBJECT_H
#define ALLRED_MAILBOX_OBJECT_H

#include <Python.h>

#include <unistd.h>

#include "request.h"
#include "service.h"

#define ALLRED_PATIENCE_NS 1000000

typedef struct {
  PyObject_HEAD Py_buffer memory, bell;
  allred_mailbox box;
  allred_request request;
  allred_service service;
  int open, inside; /* threads that work on it without the GIL */
  pid_t process;    /* that made it; a fork of that does not speak for it */
  Py_buffer *views; /* of the present request: up, down, shard */
  allred_piece *pieces;
  Py_ssize_t view_count, view_room;
  uint64_t *up_cells;
  allred_cell *down_cells;
  PyObject *whole;         /* a memoryview of the memory */
  PyObject **slots;        /* of each slot, of as many bytes as it last had */
  Py_ssize_t *slots_bytes; /* how many that were */
  Py_ssize_t slots_start;  /* in the memory */
} Mailbox;

/* Whether it may be used; and that by one thread at a time. Else 0, with an exception set. */
int allred_mailbox_is_open(const Mailbox *self);
int allred_mailbox_is_free(const Mailbox *self);

/* The bytes of a record, checked: 0, or -1 with an exception set. */
int allred_mailbox_record(PyObject *record, char **bytes, Py_ssize_t *length);

/* Give back the buffers of a request that is over. */
void allred_mailbox_release(Mailbox *self);

/* Methods and attributes of a worker. */
PyObject *allred_python_mailbox_begin(Mailbox *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_python_mailbox_done(Mailbox *self, PyObject *unused);
PyObject *allred_python_mailbox_linger(Mailbox *self, PyObject *unused);
PyObject *allred_python_mailbox_reply(Mailbox *self, void *unused);
PyObject *allred_python_mailbox_moves(Mailbox *self, void *unused);
PyObject *allred_python_mailbox_pending(Mailbox *self, void *unused);
PyObject *allred_python_mailbox_peers(Mailbox *self, void *unused);

/* Of a server. */
PyObject *allred_python_mailbox_poll(Mailbox *self, PyObject *unused);
PyObject *allred_python_mailbox_cell(Mailbox *self, PyObject *unused);
PyObject *allred_python_mailbox_linger_cell(Mailbox *self, PyObject *unused);
PyObject *allred_python_mailbox_take(Mailbox *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_python_mailbox_give(Mailbox *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_python_mailbox_answer(Mailbox *self, PyObject *reply);
PyObject *allred_python_mailbox_read(Mailbox *self, void *unused);
PyObject *allred_python_mailbox_wait_any(PyObject *type, PyObject *const *args, Py_ssize_t given);

#endif
