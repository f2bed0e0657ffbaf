/* StepServer, a type for step_server.h: a server's parameters, with the mailboxes of its workers. */
#include "mailbox_object.h"
#include "step_server.h"

#include <math.h>
#include <string.h>

#define MAX_STALENESS 256
#define REQUEST_WAIT_NS 100000 /* for the cells of a request */
#define RECORD_BYTES 64        /* of a step request and a reply (allred/ps/protocol.py) */

typedef struct {
  PyObject_HEAD allred_shard_cell *cells;
  Py_buffer *views;
  Py_ssize_t view_count;
  allred_served_shard shard;
  Mailbox **held; /* with a reference each */
  allred_service **services;
  const allred_mailbox **boxes;
  char **buffers;
  allred_server_boxes all;
  uint64_t *served; /* requests of each box since `take_counts` */
  int64_t *clocks;  /* steps that each worker has made; for policy bounded */
  uint64_t staleness[MAX_STALENESS];
} StepServer;

/* ---- construction */

static void release_boxes(StepServer *self) {
  for (int i = 0; i < self->all.count; i++) Py_DECREF((PyObject *)self->held[i]);
  self->all.count = 0;
}

static void destruct(StepServer *self) {
  release_boxes(self);
  while (self->view_count) PyBuffer_Release(&self->views[--self->view_count]);
  PyMem_Free(self->views), PyMem_Free(self->cells), PyMem_Free(self->held), PyMem_Free(self->services);
  PyMem_Free(self->boxes), PyMem_Free(self->buffers), PyMem_Free(self->served), PyMem_Free(self->clocks);
  allred_free_object(self);
}

/* Read one cell: a tuple of the arrays of the rule, the gradient left out, None for a missing slot. */
static int read_cell(StepServer *self, PyObject *tuple, allred_shard_cell *cell) {
  const allred_rule *rule = self->shard.rule;
  if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != rule->arrays - 1)
    return PyErr_Format(PyExc_TypeError, "a cell is a tuple of %d arrays", rule->arrays - 1), -1;
  for (int i = 0; i < rule->arrays - 1; i++) {
    PyObject *array = PyTuple_GetItem(tuple, i);
    const int slot = i ? i + 1 : 0; /* array 1 is the gradient */
    if (array == Py_None && slot >= rule->needed) continue;
    Py_buffer *view = &self->views[self->view_count];
    if (PyObject_GetBuffer(array, view, PyBUF_CONTIG | PyBUF_FORMAT) < 0) return -1;
    self->view_count++;
    const int bytes = (int)view->itemsize, known = view->format && strchr("fd", view->format[0]) && !view->format[1];
    if (i == 0) cell->element_bytes = bytes, cell->elements = (size_t)(view->len / view->itemsize);
    if (!known || bytes != cell->element_bytes || (size_t)view->len != cell->elements * (size_t)bytes)
      return PyErr_Format(PyExc_ValueError, "array %d of a cell has another type or size", i), -1;
    cell->arrays[slot] = view->buf;
  }
  return 0;
}

static int construct(StepServer *self, PyObject *args, PyObject *unused) {
  PyObject *cells;
  const char *name;
  if (self->cells) return PyErr_SetString(PyExc_TypeError, "the server is constructed already"), -1;
  if (!PyArg_ParseTuple(args, "sO!:StepServer", &name, &PyList_Type, &cells)) return -1;
  const allred_rule *rule = allred_find_rule(name);
  if (!rule || rule->slot_per_row) return PyErr_Format(PyExc_ValueError, "no elementwise rule '%s'", name), -1;
  const Py_ssize_t count = PyList_Size(cells);
  self->shard = (allred_served_shard){.rule = rule, .count = (size_t)count};
  self->cells = PyMem_Calloc((size_t)count + 1, sizeof *self->cells);
  self->views = PyMem_Calloc((size_t)count * ALLRED_RULE_ARRAYS + 1, sizeof *self->views);
  if (!self->cells || !self->views) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < count; i++)
    if (read_cell(self, PyList_GetItem(cells, i), &self->cells[i]) < 0) return -1;
  self->shard.cells = self->cells;
  return 0;
}

static int check_constructed(const StepServer *self) {
  if (!self->cells) PyErr_SetString(PyExc_ValueError, "the server is not constructed");
  return self->cells != NULL;
}

static PyObject *set_boxes(StepServer *self, PyObject *args) {
  PyObject *list;
  PyTypeObject *type;
  if (!check_constructed(self) || !PyArg_ParseTuple(args, "O!O!:set_boxes", &PyList_Type, &list, &PyType_Type, &type))
    return NULL;
  const Py_ssize_t count = PyList_Size(list);
  release_boxes(self);
  Mailbox **held = PyMem_Realloc(self->held, ((size_t)count + 1) * sizeof *held);
  if (held) self->held = held;
  allred_service **services = PyMem_Realloc(self->services, ((size_t)count + 1) * sizeof *services);
  if (services) self->services = services;
  const allred_mailbox **boxes = PyMem_Realloc(self->boxes, ((size_t)count + 1) * sizeof *boxes);
  if (boxes) self->boxes = boxes;
  char **buffers = PyMem_Realloc(self->buffers, ((size_t)count + 1) * sizeof *buffers);
  if (buffers) self->buffers = buffers;
  int64_t *clocks = PyMem_Realloc(self->clocks, ((size_t)count + 1) * sizeof *clocks);
  if (clocks) self->clocks = clocks;
  uint64_t *served = PyMem_Calloc((size_t)count + 1, sizeof *served);
  if (!held || !services || !boxes || !buffers || !clocks || !served) return PyMem_Free(served), PyErr_NoMemory();
  PyMem_Free(self->served);
  self->served = served;
  self->all.services = self->services, self->all.boxes = self->boxes, self->all.buffers = self->buffers;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *box = PyList_GetItem(list, i);
    if (!PyObject_TypeCheck(box, type)) return PyErr_Format(PyExc_TypeError, "box %zd is not a Mailbox", i);
    self->held[i] = (Mailbox *)Py_NewRef(box);
    self->services[i] = &self->held[i]->service, self->boxes[i] = &self->held[i]->box;
    self->all.count = (int)i + 1;
  }
  Py_RETURN_NONE;
}

/* ---- serving */

/* Enter all mailboxes, so that they are not closed without the GIL: 0 with an exception set if one cannot be used. */
static int enter(StepServer *self) {
  for (int i = 0; i < self->all.count; i++) {
    if (!allred_mailbox_is_free(self->held[i])) {
      while (i) self->held[--i]->inside--;
      return 0;
    }
    self->held[i]->inside++;
    self->buffers[i] = self->held[i]->buffer;
  }
  return 1;
}

static void leave(StepServer *self) {
  for (int i = 0; i < self->all.count; i++) self->held[i]->inside--;
}

static int set_numbers(StepServer *self, PyObject *numbers) {
  if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != self->shard.rule->numbers)
    return PyErr_Format(PyExc_TypeError, "%s takes %d numbers", self->shard.rule->name, self->shard.rule->numbers), 0;
  for (int i = 0; i < self->shard.rule->numbers; i++) {
    self->shard.numbers[i] = PyFloat_AsDouble(PyTuple_GetItem(numbers, i));
    if (PyErr_Occurred()) return 0;
  }
  return 1;
}

static PyObject *wrong_size(void) {
  return PyErr_Format(PyExc_ValueError, "the worker sent a cell with a wrong size or place");
}

static PyObject *apply(StepServer *self, PyObject *args) {
  int at, gives;
  Py_ssize_t first;
  PyObject *numbers;
  if (!check_constructed(self) || !PyArg_ParseTuple(args, "inpO:apply", &at, &first, &gives, &numbers) ||
      !set_numbers(self, numbers))
    return NULL;
  if (at < 0 || at >= self->all.count || first < 0 || (size_t)first > self->shard.count)
    return PyErr_Format(PyExc_ValueError, "there is no box %d, or no cell %zd", at, first);
  if (!self->held[at]->service.open) return PyErr_Format(PyExc_ValueError, "no request is being served");
  size_t next;
  if (!enter(self)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  next = allred_apply_cells(&self->shard, &self->all, at, (size_t)first, gives, ALLRED_SPIN_WAIT_NS);
  Py_END_ALLOW_THREADS;
  leave(self);
  return next == SIZE_MAX ? wrong_size() : PyLong_FromSize_t(next);
}

/* The numbers of Adam in update t (allred/optim/optimizers.py has the same arithmetic). */
typedef struct {
  int is_adam, decays_apart;
  double lr, beta1, beta2, eps, weight_decay;
} served_rule;

static void numbers_of_update(StepServer *self, const served_rule *rule, int64_t t) {
  double *numbers = self->shard.numbers;
  if (!rule->is_adam) return;
  numbers[0] = rule->lr / (1.0 - pow(rule->beta1, (double)t));
  numbers[1] = rule->beta1, numbers[2] = rule->beta2;
  numbers[3] = sqrt(1.0 - pow(rule->beta2, (double)t));
  numbers[4] = rule->eps;
  numbers[5] = rule->decays_apart ? rule->lr * rule->weight_decay : rule->weight_decay;
}

typedef struct {
  int32_t flags;
  int64_t step, version;
  double lr;
} step_request;

static step_request read_request(const allred_record *record) {
  step_request request;
  memcpy(&request.flags, record->record, 4);
  memcpy(&request.step, record->record + 4, 8);
  memcpy(&request.version, record->record + 12, 8);
  memcpy(&request.lr, record->record + 20, 8);
  return request;
}

static void answer(StepServer *self, int at, int64_t step, int64_t version, int64_t staleness) {
  char reply[RECORD_BYTES] = {0};
  memcpy(reply + 4, &step, 8);
  memcpy(reply + 12, &version, 8);
  memcpy(reply + 20, &staleness, 8);
  allred_service_answer(self->services[at], self->boxes[at], reply, sizeof reply);
}

typedef struct {
  int32_t flags;
  int64_t version, update; /* of the parameters; of the optimizer */
  double lr;
  served_rule rule;
  int64_t limit_ns;
  int64_t largest_lead;           /* of a worker's clock over the slowest one after its step; -1: no bound */
  int first, found, wrong, chief; /* chief: the box of the worker whose learning rate counts, or -1 */
  allred_record record;           /* of the request that was not served */
} service_run;

/* Whether the worker may continue at once after this step. */
static int may_continue(const StepServer *self, int at, int64_t largest_lead) {
  for (int i = 0; largest_lead >= 0 && i < self->all.count; i++)
    if (i != at && self->clocks[at] + 1 - self->clocks[i] > largest_lead) return 0;
  return 1;
}

/* Serve requests until one is of another kind or its worker must wait afterwards, whose box and record are kept; or
 * until the limit. */
static void serve_requests(StepServer *self, service_run *run) {
  const int64_t until = allred_now_ns() + run->limit_ns;
  run->found = -1;
  for (int64_t left = run->limit_ns; left > 0; left = until - allred_now_ns()) {
    const int at = allred_mailbox_wait_any(self->services, self->boxes, self->all.count, run->first, left);
    if (at < 0) return;
    run->first = (at + 1) % self->all.count;
    if (!allred_service_poll(self->services[at], self->boxes[at], &run->record)) continue;
    const step_request request = read_request(&run->record);
    const int64_t staleness = run->version - request.version;
    const int is_step = run->record.bytes == RECORD_BYTES && request.flags == run->flags && staleness >= 0 &&
                        staleness < MAX_STALENESS && (at != run->chief || isnan(request.lr) || request.lr == run->lr) &&
                        may_continue(self, at, run->largest_lead);
    if (!is_step || !allred_request_is_there(&self->shard, &self->all, at, REQUEST_WAIT_NS)) {
      run->found = at;
      return;
    }
    numbers_of_update(self, &run->rule, ++run->update);
    if (allred_apply_cells(&self->shard, &self->all, at, 0, 1, REQUEST_WAIT_NS) != self->shard.count) {
      run->wrong = 1;
      return;
    }
    run->version++, self->clocks[at]++;
    self->served[at]++, self->staleness[staleness]++;
    answer(self, at, request.step + 1, run->version, staleness);
  }
}

static int set_clocks(StepServer *self, PyObject *list) {
  for (int i = 0; i < self->all.count; i++) self->clocks[i] = 0;
  if (list == Py_None) return 1;
  if (!PyList_Check(list) || PyList_Size(list) != self->all.count)
    return PyErr_Format(PyExc_TypeError, "clocks are a list with one number of each box"), 0;
  for (int i = 0; i < self->all.count; i++) self->clocks[i] = PyLong_AsLongLong(PyList_GetItem(list, i));
  return !PyErr_Occurred();
}

/* serve(flags, version, update, lr, numbers, adam, limit_us, first, chief, clocks, largest_lead)
   -> (version, update, box or -1, record) */
static PyObject *serve(StepServer *self, PyObject *args) {
  service_run run = {.found = -1};
  PyObject *numbers, *adam, *clocks;
  long long version, updates, largest_lead;
  Py_ssize_t limit_us;
  if (!check_constructed(self) ||
      !PyArg_ParseTuple(args, "iLLdOOniiOL:serve", &run.flags, &version, &updates, &run.lr, &numbers, &adam, &limit_us,
                        &run.first, &run.chief, &clocks, &largest_lead) ||
      !set_clocks(self, clocks))
    return NULL;
  if (adam == Py_None) {
    if (!set_numbers(self, numbers)) return NULL;
  } else {
    served_rule *rule = &run.rule;
    rule->is_adam = 1, rule->lr = run.lr, rule->decays_apart = strcmp(self->shard.rule->name, "adamw") == 0;
    if (!PyArg_ParseTuple(adam, "dddd:adam", &rule->beta1, &rule->beta2, &rule->eps, &rule->weight_decay)) return NULL;
  }
  if (self->all.count < 1 || limit_us < 0 || run.first < 0)
    return PyErr_Format(PyExc_ValueError, "serve needs boxes, and a limit and a first box that are not negative");
  run.largest_lead = clocks == Py_None ? -1 : largest_lead;
  run.version = version, run.update = updates, run.limit_ns = limit_us * 1000, run.first %= self->all.count;
  if (!enter(self)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  serve_requests(self, &run);
  Py_END_ALLOW_THREADS;
  leave(self);
  if (run.wrong) return wrong_size();
  PyObject *record =
      run.found < 0 ? Py_NewRef(Py_None) : PyBytes_FromStringAndSize(run.record.record, (Py_ssize_t)run.record.bytes);
  return record ? Py_BuildValue("LLiN", (long long)run.version, (long long)run.update, run.found, record) : NULL;
}

static PyObject *take_counts(StepServer *self, PyObject *unused) {
  PyObject *boxes = PyList_New(0), *staleness = PyList_New(0);
  int failed = !boxes || !staleness;
  for (int kind = 0; kind < 2 && !failed; kind++) {
    uint64_t *counts = kind ? self->staleness : self->served;
    const int length = kind ? MAX_STALENESS : self->all.count;
    for (int i = 0; i < length && !failed; i++) {
      if (!counts[i]) continue;
      PyObject *pair = Py_BuildValue("iK", i, (unsigned long long)counts[i]);
      failed = !pair || PyList_Append(kind ? staleness : boxes, pair) < 0;
      Py_XDECREF(pair);
      counts[i] = 0;
    }
  }
  if (!failed) return Py_BuildValue("NN", boxes, staleness);
  Py_XDECREF(boxes);
  Py_XDECREF(staleness);
  return NULL;
}

static PyMethodDef methods[] = {
    METHOD("set_boxes", set_boxes, METH_VARARGS, "Set the mailboxes of all workers; and their type."),
    METHOD("apply", apply, METH_VARARGS, "Apply cells of the request of a box from a number on; return the next one."),
    METHOD("serve", serve, METH_VARARGS, "Serve steps until another request arrives, or a limit."),
    METHOD("take_counts", take_counts, METH_NOARGS, "Return how many were served by box, and by staleness, since."),
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_doc, "StepServer(rule, cells): see step_server.h."},
                              {Py_tp_init, construct},
                              {Py_tp_dealloc, destruct},
                              {Py_tp_methods, methods},
                              {0, NULL}};

PyType_Spec allred_step_server_spec = {"allred.native._kernels.StepServer", sizeof(StepServer), 0, Py_TPFLAGS_DEFAULT,
                                       slots};
