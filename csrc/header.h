/* The 64-byte header that every rank shows every other before an operation; allred/comm/header.py says what is in it.
 */
#ifndef ALLRED_HEADER_H
#define ALLRED_HEADER_H

#include <stddef.h>
#include <stdint.h>

enum { ALLRED_KIND_ALLREDUCE = 0, ALLRED_KIND_GROUPED_ALLREDUCE = 1 }; /* positions in header.py KINDS */

/* The byte `op` of a reduction: the operator, and the wire type of float32 and float64 if that is another. */
enum { ALLRED_OP_BITS = 15, ALLRED_WIRE_SHIFT = 4 };

typedef struct {
  uint64_t sequence;
  uint8_t kind, op, dtype, problem;
  int32_t root;
  uint64_t name, words, count, agreed_spare;
  uint64_t rows, note; /* each rank's own; everything before must agree */
} allred_header;

_Static_assert(sizeof(allred_header) == 64, "one cache line, and header.BYTES");

/* Continue a hash by one 64-bit word; header.py `mix` is its twin. */
static inline uint64_t allred_mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
  return hash ^ (hash >> 29);
}

/* The hash of a text: its length, then its bytes in little-endian words, the last one filled up with zeros. */
uint64_t allred_hash_text(const char *text, size_t length);

/* Whether two headers agree in all that must agree, and neither says that its rank cannot take part. */
int allred_headers_agree(const allred_header *a, const allred_header *b);

#endif
