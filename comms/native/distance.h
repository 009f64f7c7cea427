/* How far apart the cores are that ranks run on: near each other if they share a cache, which a scheduler or a hypervisor
 * may change at any time.
 *
 * Between near cores a block is best copied as usual: it stays in the cache that both see. Between far ones a line that is
 * dirty in the other's cache takes five to ten times as long as one from memory, so blocks go past the caches. Who writes
 * a block cannot tell, and who reads it can: an op on more than a few KiB begins with a line that every rank writes
 * (`sound`); whoever takes something from it takes the time of reading that line (`listen`), and says at the end whether
 * it was near. */

#ifndef HOLDFAST_DISTANCE_H
#define HOLDFAST_DISTANCE_H

#include "board.h"

/* Nanoseconds, the clock's own twenty included: 30 to 60 between cores of one cache on AMD's Zen, 80 to 100 on the mesh of
 * Intel's Ice Lake, which is near, too; 130 and more where they share none. */
#define FARTHEST 115

static inline void sound(board *b) {
    word *line = word_of(b, b->rank, SOUNDING);
    atomic_store_explicit(line, atomic_load_explicit(line, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* Once in an op, after `rank` is known to have begun it. */
static inline void listen(board *b, int rank) {
    uint64_t began = nanoseconds();
    (void)flag_of(b, rank, SOUNDING);
    uint64_t took = nanoseconds() - began;
    b->heard.now = took > b->heard.now ? took : b->heard.now;
}

/* Tell the others whether what this rank took was near, in two ops: to be wrong costs more where it was far. */
static inline void tell_distance(board *b) {
    distance *d = &b->heard;
    if (!d->now)
        return;
    int near = d->before && d->before <= FARTHEST && d->now <= FARTHEST;
    atomic_store_explicit(word_of(b, b->rank, NEAR), (uint64_t)near, memory_order_relaxed);
    d->before = d->now, d->now = 0;
}

/* Whether all who read what this rank writes say that they are near. */
static inline int all_near(const board *b) { return all_say(b, NEAR, 1); }

#endif
