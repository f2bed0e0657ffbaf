/*
 * Serves requests that push a gradient and pull the parameters. The server applies each cell of the gradient when it
 * arrives, and then lets the worker copy the updated cell of the parameters.
 *
 * The server takes requests one by one. It changes a cell only after every other worker has copied what it may still
 * copy of its last request. No Python, no allocation.
 */
#ifndef ALLRED_STEP_SERVER_H
#define ALLRED_STEP_SERVER_H

#include "mailbox.h"
#include "update.h"

/* A part of the parameters: the arrays of a rule, without the gradient. */
typedef struct {
  void *arrays[ALLRED_RULE_ARRAYS];
  size_t elements;
  int element_bytes; /* 4: float; 8: double */
} allred_shard_cell;

/* The ends of the mailboxes of all workers at one server. */
typedef struct {
  allred_service *const *services;
  const allred_mailbox *const *boxes;
  char *const *buffers; /* of slot_bytes bytes each; NULL without an arena */
  int count;
} allred_server_boxes;

typedef struct {
  const allred_shard_cell *cells;
  size_t count;
  const allred_rule *rule;
  double numbers[ALLRED_RULE_NUMBERS]; /* the hyperparameters of the next update */
} allred_served_shard;

/*
 * Apply the cells of the request of box `at` from number `first` on, and give each to the worker if `gives`. Return the
 * number of the next cell: less than their count if it has not arrived, or another worker has not read it, for
 * `idle_limit_ns`. SIZE_MAX if the worker states a wrong size.
 */
size_t allred_apply_cells(const allred_served_shard *, const allred_server_boxes *, int at, size_t first, int gives,
                          int64_t idle_limit_ns);

/* Whether this request can be applied without a wait: all its cells have arrived, and all workers have read theirs. */
int allred_request_is_there(const allred_served_shard *, const allred_server_boxes *, int at, int64_t idle_limit_ns);

#endif
