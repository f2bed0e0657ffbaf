/* Tensor fusion: many small pieces of memory into one buffer, and back. No Python, no globals, no allocation. */
#ifndef ALLRED_FUSE_H
#define ALLRED_FUSE_H

#include <stddef.h>

/* One tensor's memory: `bytes` bytes from `data` on. */
typedef struct {
  char *data;
  size_t bytes;
} allred_piece;

/* Bytes that `count` pieces take one after the other. */
size_t allred_pieces_bytes(const allred_piece *pieces, size_t count);

/* Copy the pieces, in order and without gaps, to `buffer`, which must hold allred_pieces_bytes() bytes. */
void allred_pack(const allred_piece *pieces, size_t count, char *buffer);

/* The reverse: fill the pieces, in order, from `buffer`. */
void allred_unpack(const allred_piece *pieces, size_t count, const char *buffer);

#endif
