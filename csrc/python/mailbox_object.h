/*
 * The Python type `Mailbox`: one end of the link between a worker and a parameter server (mailbox.h).
 *
 *   mailbox_type.c     construction, the methods of a worker, and close()
 *   mailbox_server.c   the methods of a server
 */
#ifndef ALLRED_MAILBOX_OBJECT_H
#define ALLRED_MAILBOX_OBJECT_H

#include "binding.h"

#include <unistd.h>

#include "mailbox.h"

typedef struct {
  PyObject_HEAD Py_buffer memory, doorbell;
  allred_mailbox box;
  allred_request request;
  allred_service service;
  int open, inside; /* inside: threads that use the mailbox without the GIL */
  pid_t process;    /* the process that made it; a forked child must not close it for its parent */
  Py_buffer *views; /* of the current request: up, down, shard */
  allred_piece *pieces;
  Py_ssize_t view_count, view_capacity;
  uint64_t *up_cells;
  allred_cell *down_cells;
  PyObject *whole;                    /* a memoryview of the memory */
  PyObject **slots;                   /* for each slot a memoryview of as many bytes as its last cell had */
  Py_ssize_t *slots_bytes;            /* these numbers of bytes */
  Py_ssize_t slots_start;             /* in the memory */
  Py_buffer arena;                    /* of the worker; obj is NULL if there is none */
  PyObject *arena_view, *buffer_view; /* memoryviews of it, and of a server's buffer of slot_bytes bytes */
  char *buffer;
} Mailbox;

/* Whether the mailbox is open; whether also no other thread uses it. If not, 0 with an exception set. */
int allred_mailbox_is_open(const Mailbox *self);
int allred_mailbox_is_free(const Mailbox *self);

/* Check and read the bytes of a record: 0, or -1 with an exception set. */
int allred_mailbox_record(PyObject *record, char **bytes, Py_ssize_t *length);

/* Methods and attributes of a server. */
PyObject *allred_python_mailbox_poll(Mailbox *self, PyObject *unused);
PyObject *allred_python_mailbox_cell(Mailbox *self, PyObject *unused);
PyObject *allred_python_mailbox_spin_wait_cell(Mailbox *self, PyObject *unused);
PyObject *allred_python_mailbox_take(Mailbox *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_python_mailbox_give(Mailbox *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_python_mailbox_answer(Mailbox *self, PyObject *reply);
PyObject *allred_python_mailbox_read(Mailbox *self, void *unused);
PyObject *allred_python_mailbox_wait_any(PyObject *type, PyObject *const *args, Py_ssize_t given);

#endif
