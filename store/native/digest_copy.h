/* Copies memory and computes the XXH3 checksum (64 bits) of each piece in the same pass, by several threads.
 *
 * XXH3 after Y. Collet, xxhash 0.8 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md), for inputs of
 * more than 240 bytes. Bytes are stored as they are read for the checksum, so that verification costs no pass
 * over memory. */

#ifndef HOLDFAST_DIGEST_COPY_H
#define HOLDFAST_DIGEST_COPY_H

#include <stdint.h>

#define DIGEST_LEAST 241 /* bytes of the smallest piece that this computes */

/* The checksum of `nbytes` (DIGEST_LEAST or more) bytes at `source`, which are copied to `target` unless that
 * is NULL. With `stream` the copy bypasses the caches. */
uint64_t digest_copy_piece(const uint8_t *source, uint8_t *target, uint64_t nbytes, int stream);

#endif
