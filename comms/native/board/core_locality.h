/* How far apart the cores are that ranks run on: near each other if they share a cache, which a scheduler or a hypervisor
 * may change at any time.
 *
 * Between near cores a block is best copied as usual: it stays in the cache that both see. Between far ones a line that is
 * dirty in the other's cache takes five to ten times as long as one from memory, so blocks go past the caches. Who writes
 * a block cannot tell, and who reads it can: an op on more than a few KiB begins with a line that every rank writes
 * (`sound`); whoever takes something from it takes the time of reading that line (`listen`), and says at the end whether
 * it was near. */

#ifndef HOLDFAST_CORE_LOCALITY_H
#define HOLDFAST_CORE_LOCALITY_H

#include "board/board.h"

/* Nanoseconds, the clock's own twenty included: 30 to 60 between cores of one cache on AMD's Zen, 80 to 100 on the mesh of
 * Intel's Ice Lake, which is near, too; 130 and more where they share none. */
#define NEAR_NANOSECONDS 115

static inline void probe_write(board *b) {
    word *line = word_of(b, b->rank, PROBE);
    atomic_store_explicit(line, atomic_load_explicit(line, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* Once in an op, after `rank` is known to have begun it. */
static inline void probe_read(board *b, int rank) {
    uint64_t began = nanoseconds();
    (void)flag_of(b, rank, PROBE);
    uint64_t took = nanoseconds() - began;
    b->latency.current = took > b->latency.current ? took : b->latency.current;
}

/* Tell the others whether what this rank took was near, in two ops: to be wrong costs more where it was far. */
static inline void publish_locality(board *b) {
    read_latency *read = &b->latency;
    if (!read->current)
        return;
    int near = read->previous && read->previous <= NEAR_NANOSECONDS && read->current <= NEAR_NANOSECONDS;
    atomic_store_explicit(word_of(b, b->rank, NEAR), (uint64_t)near, memory_order_relaxed);
    read->previous = read->current, read->current = 0;
}

/* Whether all who read what this rank writes say that they are near. */
static inline int all_near(const board *b) { return all_have_bits(b, NEAR, 1); }

#endif
