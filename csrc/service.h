/* A server's end of mailboxes: steps 2, 4, 5 and 7 of mailbox.h. */
#ifndef ALLRED_SERVICE_H
#define ALLRED_SERVICE_H

#include "mailbox.h"

/* What a server knows of its present request; zeros at first. */
typedef struct {
  uint64_t number, taken, given;
  int open;          /* not answered */
  int64_t idle_from; /* since when wait_any has found nothing; 0 if it has. Kept with the first box */
} allred_service;

/* Whether there is a request that it has not polled. If so: begin with it, and copy its record. */
int allred_service_asked(const allred_service *, const allred_mailbox *);
int allred_service_poll(allred_service *, const allred_mailbox *, allred_record *);

/* How many cells are in the ring and not taken. The slot of the first of them, and what the worker says it holds, which
 * may be nonsense: more than slot_bytes. */
size_t allred_service_cells(const allred_service *, const allred_mailbox *);
size_t allred_service_slot(const allred_service *, const allred_mailbox *, size_t *bytes);

/* So many cells more are done with; may be read. */
void allred_service_take(allred_service *, const allred_mailbox *, size_t cells);
void allred_service_give(allred_service *, const allred_mailbox *, size_t cells);

/* How many cells of this request the worker has copied, also after the answer. */
size_t allred_service_read(const allred_service *, const allred_mailbox *);

void allred_service_answer(allred_service *, const allred_mailbox *, const char *record, size_t bytes);

/* Wait for a cell, at most so long; whether there is one. */
int allred_service_wait(const allred_service *, const allred_mailbox *, int64_t patience_ns);

/* A box with a new request, looked for from `first` on; -1 if none has one within the limit. Spins, yields, and sleeps
 * where nothing has come for a millisecond, in this call and those before: on the bell of the boxes, if they have one
 * in common. */
int allred_mailbox_wait_any(allred_service *const *, const allred_mailbox *const *, int count, int first,
                            int64_t limit_ns);

#endif
