/* What one pass over a tensor's memory tells: a hash, and whether it has a large float. No Python, no globals. */
#ifndef ALLRED_SCAN_H
#define ALLRED_SCAN_H

#include <stddef.h>
#include <stdint.h>

/*
 * A 64-bit hash of the bytes, the same on every little-endian machine; not against those who mean harm. With the words
 * a[j], b[j] of 32 bits in turn (zeros fill up the last), k[j] = j * ALLRED_HASH_A, l[j] = j * ALLRED_HASH_B mod 2**32:
 *
 *   hash = bytes * ALLRED_HASH_LENGTH + sum of ((a[j] + k[j]) mod 2**32) * ((b[j] + l[j]) mod 2**32) + a[j] + 2**32
 * b[j]
 *
 * mod 2**64. The products make it depend on where a word stands; the words are added to them so that a word still
 * counts where the other factor happens to be 0.
 */
#define ALLRED_HASH_A 0x9e3779b1u
#define ALLRED_HASH_B 0x85ebca77u
#define ALLRED_HASH_LENGTH 0xc2b2ae3d27d4eb4fu
uint64_t allred_hash(const void *data, size_t bytes);

/*
 * Whether an element's magnitude is above `limit`. Elements are floats of 2, 4 or 8 bytes, and compared as bits without
 * the sign, which is in the order of magnitudes, infinity and NaN last; of 8 bytes only the upper 4 are. `variant` is
 * one of reduce.h's; from the second on, AVX2's, they share a kernel.
 */
int allred_exceeds(const void *data, size_t bytes, int element_bytes, uint32_t limit, int variant);

#endif
