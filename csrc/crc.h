/* CRC-32 of zlib and gzip, for the checksums of checkpoints. */
#ifndef ALLRED_CRC_H
#define ALLRED_CRC_H

#include <stddef.h>
#include <stdint.h>

/* Whether this CPU has an instruction for carry-less products; without it zlib is not slower. */
int allred_crc32_is_fast(void);

/* Continue a CRC-32, as zlib's crc32: `value` is 0, or the result for the bytes before. Only if it is fast. */
uint32_t allred_crc32(const void *data, size_t bytes, uint32_t value);

#endif
