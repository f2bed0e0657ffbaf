/* The 64-byte header that every rank shows to every other before an operation; allred/comm/header.py has its layout. */
#ifndef ALLRED_HEADER_H
#define ALLRED_HEADER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Positions in header.py KINDS. A step allreduce is a grouped allreduce whose `note` is the number of samples. */
enum { ALLRED_KIND_ALLREDUCE = 0, ALLRED_KIND_GROUPED_ALLREDUCE = 1, ALLRED_KIND_STEP_ALLREDUCE = 13 };

/* The byte `op` of a reduction: the operator; the type in which floats travel, or 0; and whether
 * each rank's numbers are multiplied by a weight of this rank, which is in `note`, as a float64. */
enum { ALLRED_OP_BITS = 15, ALLRED_WIRE_SHIFT = 4, ALLRED_WIRE_BITS = 7, ALLRED_WEIGHTED = 128 };

typedef struct {
  uint64_t sequence;
  uint8_t kind, op, dtype, problem;
  int32_t root;
  uint64_t name, words, count, generation;
  uint64_t rows, note; /* may differ between ranks; all fields before must agree */
} allred_header;

_Static_assert(sizeof(allred_header) == 64, "one cache line, and header.BYTES");

/* Whether two headers agree in all fields that must agree, and no rank reports a problem. */
static inline int allred_headers_agree(const allred_header *a, const allred_header *b) {
  return memcmp(a, b, offsetof(allred_header, rows)) == 0 && a->problem == 0;
}

static inline double allred_header_weight(const allred_header *header) {
  double weight;
  memcpy(&weight, &header->note, sizeof weight);
  return weight;
}

static inline int allred_header_wire(const allred_header *header) {
  return header->op >> ALLRED_WIRE_SHIFT & ALLRED_WIRE_BITS;
}

/* Add one 64-bit word to a hash; header.py `mix` is the same in Python. */
static inline uint64_t allred_mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
  return hash ^ (hash >> 29);
}

/* Return the hash of a text: its length, then its bytes as little-endian words, the last padded with zeros. */
static inline uint64_t allred_hash_text(const char *text, size_t length) {
  uint64_t hash = allred_mix(0, length);
  for (size_t i = 0; i < length; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    memcpy(&word, text + i, length - i < sizeof word ? length - i : sizeof word);
    hash = allred_mix(hash, word);
  }
  return hash;
}

#endif
