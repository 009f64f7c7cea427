/* Measure whether ranks run on cores that share a cache ("near"). A scheduler or a hypervisor may change that
 * at any time.
 *
 * Between near cores a plain copy is best: the block stays in the shared cache. Between far cores, reading a
 * line that is dirty in the other's cache takes five to ten times as long as reading it from memory, so
 * blocks bypass the caches. The writer cannot tell which holds, but the reader can: every op of more than a
 * few KiB begins with a line that each rank writes (`probe_write`). A rank that reads data times a read of
 * that line (`probe_read`), and publishes at the end whether it was near. */

#ifndef HOLDFAST_CORE_LOCALITY_H
#define HOLDFAST_CORE_LOCALITY_H

#include "board/board.h"

/* Nanoseconds, of which the clock takes twenty: 30 to 60 between cores of one cache on AMD's Zen, 80 to 100
 * on the mesh of Intel's Ice Lake, which counts as near; 130 and more without a shared cache. */
#define NEAR_NANOSECONDS 115

static inline void probe_write(board *b) {
    word *line = word_of(b, b->rank, PROBE);
    atomic_store_explicit(line, atomic_load_explicit(line, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* Call once an op, after `rank` is known to have begun it. */
static inline void probe_read(board *b, int rank) {
    uint64_t began = nanoseconds();
    (void)flag_of(b, rank, PROBE);
    uint64_t took = nanoseconds() - began;
    b->latency.current = took > b->latency.current ? took : b->latency.current;
}

/* Publish whether this rank read from near cores. It takes two near ops in a row: taking far for near costs
 * more than the reverse. */
static inline void publish_locality(board *b) {
    read_latency *read = &b->latency;
    if (!read->current)
        return;
    int near = read->previous && read->previous <= NEAR_NANOSECONDS && read->current <= NEAR_NANOSECONDS;
    atomic_store_explicit(word_of(b, b->rank, NEAR), (uint64_t)near, memory_order_relaxed);
    read->previous = read->current, read->current = 0;
}

/* Whether all readers of this rank's data publish that they are near. */
static inline int all_near(const board *b) { return all_have_bits(b, NEAR, 1); }

#endif
