/* Read the inputs of other ranks where they lie: by `memcpy` between threads of one process, else by the
 * kernel's copy between processes. A rank returns from the op only after all readers are done, unless it
 * fails. Then it aborts the board first, so a rank that is still reading can tell that its data may be from a
 * later use of the memory. */

#ifndef HOLDFAST_IN_PLACE_READ_H
#define HOLDFAST_IN_PLACE_READ_H

#include "board/board.h"
#include "process_copy.h"

/* The word in which `rank` publishes the address of its piece for `to`; with `to` = `rank`, of its piece for
 * all. */
static inline word *place_of(const board *b, int rank, int to) {
    return (word *)(b->base + (uint64_t)rank * b->row + b->places + 8 * (uint64_t)to);
}

/* Whether the kernel can copy from this memory; it cannot from what a device has mapped. */
static inline int is_readable(const board *b, span part) {
    char into;
    int failed;
    struct iovec here = {&into, 1}, there = {part.at, 1};
    return !part.nbytes || copy_pieces(b->pids[b->rank], 0, &here, &there, 1, MOST_AT_ONCE, &failed) == 1;
}

/* Returns 0, or an error number: ESRCH, EFAULT, EPERM. */
static inline int read_from(const board *b, int rank, void *into, uint64_t address, uint64_t nbytes) {
    if (b->pids[rank] == b->pids[b->rank]) {
        copy_bytes(into, (const void *)(uintptr_t)address, nbytes);
        return 0;
    }
    int failed;
    struct iovec here = {into, nbytes}, there = {(void *)(uintptr_t)address, nbytes};
    copy_pieces(b->pids[rank], 0, &here, &there, 1, MOST_AT_ONCE, &failed);
    return failed;
}

#endif
