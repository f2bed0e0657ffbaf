/*
 * The link between one worker and one parameter server of a node: a box of shared memory, and the server's shard.
 *
 * A worker makes one request at a time. Its gradients go up through a ring of slots in cells: the worker gathers many
 * small tensors into one slot, and the server applies the slot straight to its shard. Parameters come down without a
 * ring: the server says how far its shard may be read, and the worker scatters that into its own tensors. While the
 * worker gathers cell k + 1 the server applies cell k, and cell k - 1 is on its way down. Request number o:
 *
 *   1  worker   write the record; then `asked` = o
 *   2  server   see `asked`, read the record
 *   3  worker   up cell k: wait until fewer than `slots` cells are not taken, fill slot k % slots; `sent` = (o, k + 1)
 *   4  server   wait until `sent` is past k; read the slot; `taken` = (o, k + 1)
 *   5  server   down cell k of the shard is as the worker may have it; `given` = (o, k + 1)
 *   6  worker   wait until `given` is past k; copy the cell; `read` = (o, k + 1)
 *   7  server   write the reply; then `answered` = o. It is done with the slots, taken or not, and gives no more
 *   8  worker   see `answered`; send no more, copy what is given: the operation is over
 *
 * Why counters start anew without anybody setting them to 0: they hold the number of the request and the count in one
 * word, and the count of another request reads as 0.
 *
 * Why nothing is written where somebody reads. A slot is filled again when the cell before in it was taken; and the
 * first time in a request after the worker has seen the reply to the one before (8), with which the server let go of
 * all slots (7). A request's record is written after 8 of the one before; the server has read that one before 7. A
 * reply is written after the server saw the next `asked` (2), which the worker raised after it had read the last reply
 * (8). What is given of the shard is for the server to keep as it is until `read` is past it, if it wants to.
 * tests/csrc/mailbox_model.c goes through all orders of steps.
 *
 * Each side writes to lines of its own. Flags are stored with release after what they stand for and loaded with acquire
 * before that is read; they are sequentially consistent as well, because of the bells (bell.h). The other side may be
 * dead or mad: what it says is held against the sizes known here before anything is read or written by it.
 *
 * request.h is the worker's side, service.h the server's. No Python, no globals, no allocation.
 */
#ifndef ALLRED_MAILBOX_H
#define ALLRED_MAILBOX_H

#include <stddef.h>

#include "bell.h"

#define ALLRED_RECORD_BYTES 192 /* at most */
#define ALLRED_MOST_SLOTS 62
#define ALLRED_MOST_CELLS ((1 << 24) - 1) /* of one request, each way */

typedef struct {
  char *memory; /* zeros at first */
  size_t slots, slot_bytes;
  allred_bell *server_bell; /* of all boxes of a server: it sleeps on one word */
} allred_mailbox;

typedef struct {
  size_t bytes;
  char record[ALLRED_RECORD_BYTES];
} allred_record;

/* Bytes that a box takes. slot_bytes: a multiple of 64. */
size_t allred_mailbox_bytes(size_t slots, size_t slot_bytes);

/* On which the worker sleeps; and a server, if it has this box alone. */
allred_bell *allred_mailbox_worker_bell(const allred_mailbox *);
allred_bell *allred_mailbox_server_bell(const allred_mailbox *);

/* Either side leaves, for good, and wakes the other; whether one has. */
void allred_mailbox_close(const allred_mailbox *);
int allred_mailbox_closed(const allred_mailbox *);

/* The memory of a slot; and how many bytes of it are a cell, which may be nonsense: more than slot_bytes. */
char *allred_mailbox_slot(const allred_mailbox *, size_t slot);
void allred_mailbox_set_size(const allred_mailbox *, size_t slot, size_t bytes);
size_t allred_mailbox_size(const allred_mailbox *, size_t slot);

/* Publish how many cells of a request have come so far, with everything written before; how many have, at most `most`.
 */
typedef enum { ALLRED_SENT, ALLRED_TAKEN, ALLRED_GIVEN, ALLRED_READ } allred_counter;
void allred_mailbox_publish(const allred_mailbox *, allred_counter, uint64_t number, uint64_t count);
uint64_t allred_mailbox_count(const allred_mailbox *, allred_counter, uint64_t number, uint64_t most);

/* Write the record of a request or reply, and publish its number: `asked` or `answered`; which number there is; read
 * the record. */
typedef enum { ALLRED_ASKED, ALLRED_ANSWERED } allred_letter;
void allred_mailbox_post(const allred_mailbox *, allred_letter, uint64_t number, const char *record, size_t bytes);
uint64_t allred_mailbox_posted(const allred_mailbox *, allred_letter);
void allred_mailbox_open(const allred_mailbox *, allred_letter, allred_record *);

#endif
