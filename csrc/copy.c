#include "copy.h"

#include <string.h>

#if defined __x86_64__
#include <x86intrin.h>

/* A plain copy below this speed is slow: 4 to 6 GB/s, depending on the counter. */
#define BYTES_PER_TICK 2
#define MIN_TIMED_BYTES 8192
#define MIN_SLOW_COPIES 2 /* a single one may have been interrupted */
#define STREAMED_COPIES 256
#define MIN_STREAMED_BYTES 256 /* less fills too few lines */

/* Copy whole vectors to an aligned address with streaming stores. Return the bytes copied. 100 MB from other caches
 * took 5.5 ms with 16-byte vectors, 4.7 ms with 32, and the same with 64. */
#define STREAM(name, TARGET, VECTOR, LOAD, STORE)                                                                      \
  TARGET static size_t name(char *to, const char *from, size_t bytes) {                                                \
    size_t at = 0;                                                                                                     \
    for (; at + sizeof(VECTOR) <= bytes; at += sizeof(VECTOR))                                                         \
      STORE((VECTOR *)(void *)(to + at), LOAD((const VECTOR *)(const void *)(from + at)));                             \
    return at;                                                                                                         \
  }
STREAM(stream_16, , __m128i, _mm_loadu_si128, _mm_stream_si128)
STREAM(stream_32, __attribute__((target("avx"))), __m256i, _mm256_loadu_si256, _mm256_stream_si256)

/* bytes: at least those of a vector */
static void stream(char *to, const char *from, size_t bytes) {
  const size_t head = -(uintptr_t)to % sizeof(__m256i);
  memcpy(to, from, head);
  const size_t end =
      head + (__builtin_cpu_supports("avx") ? stream_32 : stream_16)(to + head, from + head, bytes - head);
  memcpy(to + end, from + end, bytes - end);
}

uint64_t allred_copy_begin(void) { return __rdtsc(); }

void allred_copy(const allred_copy_policy *policy, char *to, const char *from, size_t bytes) {
  if (policy->streaming && bytes >= MIN_STREAMED_BYTES)
    stream(to, from, bytes);
  else
    memcpy(to, from, bytes);
}

void allred_copy_end(allred_copy_policy *policy, uint64_t begun, size_t bytes) {
  if (policy->streaming) {
    _mm_sfence(); /* a release store does not order streaming stores */
    policy->streaming--;
    return;
  }
  if (bytes < MIN_TIMED_BYTES) return;
  policy->slow_copies = (__rdtsc() - begun) * BYTES_PER_TICK > bytes ? policy->slow_copies + 1 : 0;
  if (policy->slow_copies < MIN_SLOW_COPIES) return;
  policy->slow_copies = 0;
  policy->streaming = STREAMED_COPIES;
}

void allred_copy_streaming(char *to, const char *from, size_t bytes) {
  if (bytes >= MIN_STREAMED_BYTES)
    stream(to, from, bytes);
  else
    memcpy(to, from, bytes);
  _mm_sfence(); /* a release store does not order streaming stores */
}

#else

uint64_t allred_copy_begin(void) { return 0; }

void allred_copy(const allred_copy_policy *policy, char *to, const char *from, size_t bytes) {
  memcpy(to, from, bytes);
}

void allred_copy_end(allred_copy_policy *policy, uint64_t begun, size_t bytes) {}

void allred_copy_streaming(char *to, const char *from, size_t bytes) { memcpy(to, from, bytes); }

#endif
