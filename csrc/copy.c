#include "copy.h"

#include <string.h>

#if defined __x86_64__
#include <x86intrin.h>

/* A plain copy is slow below this: 4 to 6 GB/s, as counters run. From a core's own caches or from memory it is faster.
 */
#define BYTES_PER_TICK 2
#define WORTH_TIMING 8192 /* bytes */
#define SLOW_IN_A_ROW 2   /* one alone may have been interrupted */
#define COPIES_AROUND 256
#define SHORT 256 /* bytes; what is less fills too few lines */

/* Store around the caches to an aligned place, as many bytes as its vectors fill; how many. 100 MB from other caches
 * took 5.5 ms by 16 bytes, 4.7 by 32, and as much by 64. */
#define STREAM(name, TARGET, VECTOR, LOAD, STORE)                                                                      \
  TARGET static size_t name(char *to, const char *from, size_t bytes) {                                                \
    size_t at = 0;                                                                                                     \
    for (; at + sizeof(VECTOR) <= bytes; at += sizeof(VECTOR))                                                         \
      STORE((VECTOR *)(void *)(to + at), LOAD((const VECTOR *)(const void *)(from + at)));                             \
    return at;                                                                                                         \
  }
STREAM(stream_16, , __m128i, _mm_loadu_si128, _mm_stream_si128)
STREAM(stream_32, __attribute__((target("avx"))), __m256i, _mm256_loadu_si256, _mm256_stream_si256)

uint64_t allred_copy_begin(void) { return __rdtsc(); }

void allred_copy(const allred_pace *pace, char *to, const char *from, size_t bytes) {
  if (!pace->around || bytes < SHORT) {
    memcpy(to, from, bytes);
    return;
  }
  const size_t head = -(uintptr_t)to % sizeof(__m256i);
  memcpy(to, from, head);
  const size_t end =
      head + (__builtin_cpu_supports("avx") ? stream_32 : stream_16)(to + head, from + head, bytes - head);
  memcpy(to + end, from + end, bytes - end);
}

void allred_copy_end(allred_pace *pace, uint64_t begun, size_t bytes) {
  if (pace->around) {
    _mm_sfence(); /* a release store does not wait for streamed ones */
    pace->around--;
    return;
  }
  if (bytes < WORTH_TIMING) return;
  pace->slow = (__rdtsc() - begun) * BYTES_PER_TICK > bytes ? pace->slow + 1 : 0;
  if (pace->slow < SLOW_IN_A_ROW) return;
  pace->slow = 0;
  pace->around = COPIES_AROUND;
}

#else

uint64_t allred_copy_begin(void) { return 0; }

void allred_copy(const allred_pace *pace, char *to, const char *from, size_t bytes) {
  (void)pace;
  memcpy(to, from, bytes);
}

void allred_copy_end(allred_pace *pace, uint64_t begun, size_t bytes) { (void)pace, (void)begun, (void)bytes; }

#endif
