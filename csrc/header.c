#include "header.h"

#include <string.h>

uint64_t allred_hash_text(const char *text, size_t length) {
  uint64_t hash = allred_mix(0, length);
  for (size_t i = 0; i < length; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    memcpy(&word, text + i, length - i < sizeof word ? length - i : sizeof word);
    hash = allred_mix(hash, word);
  }
  return hash;
}

int allred_headers_agree(const allred_header *a, const allred_header *b) {
  return memcmp(a, b, offsetof(allred_header, rows)) == 0 && a->problem == 0;
}
