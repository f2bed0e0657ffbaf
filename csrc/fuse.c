#include "fuse.h"

#include <string.h>

size_t allred_pieces_bytes(const allred_piece *pieces, size_t count) {
  size_t total = 0;
  for (size_t i = 0; i < count; i++) total += pieces[i].bytes;
  return total;
}

void allred_pack(const allred_piece *pieces, size_t count, char *buffer) {
  for (size_t i = 0; i < count; i++) {
    memcpy(buffer, pieces[i].data, pieces[i].bytes);
    buffer += pieces[i].bytes;
  }
}

void allred_unpack(const allred_piece *pieces, size_t count, const char *buffer) {
  for (size_t i = 0; i < count; i++) {
    memcpy(pieces[i].data, buffer, pieces[i].bytes);
    buffer += pieces[i].bytes;
  }
}
