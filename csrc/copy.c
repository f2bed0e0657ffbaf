#include "copy.h"

#include <string.h>

#if defined __x86_64__
#include <emmintrin.h>
#include <x86intrin.h>

/* A plain copy is slow below this: 4 to 6 GB/s, as counters run. From a core's own caches or from memory it is faster.
 */
#define BYTES_PER_TICK 2
#define WORTH_TIMING 8192 /* bytes */
#define SLOW_IN_A_ROW 2   /* one alone may have been interrupted */
#define COPIES_AROUND 256
#define SHORT 256 /* bytes; what is less fills too few lines */

uint64_t allred_copy_begin(void) { return __rdtsc(); }

void allred_copy(const allred_pace *pace, char *to, const char *from, size_t bytes) {
  if (!pace->around || bytes < SHORT) {
    memcpy(to, from, bytes);
    return;
  }
  const size_t head = -(uintptr_t)to % sizeof(__m128i);
  memcpy(to, from, head);
  size_t at = head;
  for (; at + sizeof(__m128i) <= bytes; at += sizeof(__m128i))
    _mm_stream_si128((__m128i *)(void *)(to + at), _mm_loadu_si128((const __m128i *)(const void *)(from + at)));
  memcpy(to + at, from + at, bytes - at);
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
