/* Reading what other ranks give where it is: `memcpy` between threads of one process, else the kernel's copy from one process
 * to another. A rank that lets others read does not return from the op before they have, unless it fails; then it says first
 * that no more ops can end here, so that whoever still reads can tell that it may have read what came later. */

#ifndef HOLDFAST_IN_PLACE_READ_H
#define HOLDFAST_IN_PLACE_READ_H

#include "board/board.h"
#include "process_copy.h"

/* Where `rank` says that its piece for `to` lies in a staged op; for itself: what is for all. */
static inline word *place_of(const board *b, int rank, int to) {
    return (word *)(b->base + (uint64_t)rank * b->row + b->places + 8 * (uint64_t)to);
}

/* Whether the kernel can copy from where this lies (it cannot from what a device has mapped). */
static inline int is_readable(const board *b, span part) {
    char into;
    int failed;
    struct iovec here = {&into, 1}, there = {part.at, 1};
    return !part.nbytes || copy_pieces(b->pids[b->rank], 0, &here, &there, 1, MOST_AT_ONCE, &failed) == 1;
}

/* 0, or an error number: ESRCH, EFAULT, EPERM. */
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
