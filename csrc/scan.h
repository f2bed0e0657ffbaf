/* What one pass over memory finds: a hash of the bytes, and whether a float is too large. */
#ifndef ALLRED_SCAN_H
#define ALLRED_SCAN_H

#include <stddef.h>
#include <stdint.h>

/*
 * Return a 64-bit hash of the bytes, the same on every little-endian machine; it is not cryptographic. With alternating
 * 32-bit words a[j], b[j] (the last one padded with zeros), k[j] = j * ALLRED_HASH_A, l[j] = j * ALLRED_HASH_B mod
 * 2**32:
 *
 *   hash = bytes * ALLRED_HASH_LENGTH
 *          + sum of ((a[j] + k[j]) mod 2**32) * ((b[j] + l[j]) mod 2**32) + a[j] + 2**32 * b[j]
 *
 * mod 2**64. The products make the hash depend on the positions of words; the words are added so that a word counts
 * even if the other factor is 0.
 */
#define ALLRED_HASH_A 0x9e3779b1u
#define ALLRED_HASH_B 0x85ebca77u
#define ALLRED_HASH_LENGTH 0xc2b2ae3d27d4eb4fu
uint64_t allred_hash(const void *data, size_t bytes);

/*
 * Whether the magnitude of an element is above `limit`. Elements are floats of 2, 4 or 8 bytes. Their bits without the
 * sign are compared as integers, which is the order of magnitudes, infinity and NaN last; of 8 bytes the upper 4.
 * `variant` is one of reduce.h; the variants from AVX2 on share a kernel.
 */
int allred_exceeds(const void *data, size_t bytes, int element_bytes, uint32_t limit, int variant);

/* Whether all elements of a dtype of reduce.h are finite, both parts of complex numbers; 1 for integers and bools. */
int allred_all_finite(const void *data, size_t bytes, int dtype, int variant);

#endif
