/* Choose how a large op moves data: STAGED, where the ranks copy every byte twice, or IN_PLACE, where the
 * kernel copies it once but looks up every page. The faster mode depends on processor, kernel and size: on
 * AMD's Zen 3 one wins by up to two thirds, on Intel's Ice Lake the other by as much.
 *
 * Every rank times its ops by class (kind and size) and publishes the mode it prefers for the next op of that
 * class. A rank that gives data uses the mode that all others prefer. The other mode is retried now and then,
 * since machines change. */

#ifndef HOLDFAST_COPY_MODE_H
#define HOLDFAST_COPY_MODE_H

#include "board/board.h"

enum { STAGED, IN_PLACE };
enum { OP_CLASSES = 32, SIZES = 8, RETRY_EVERY = 64 };
enum { WARM_UP = 2 }; /* the first op of a class touches its memory for the first time */

typedef struct {
    uint64_t best[2]; /* recent best nanoseconds of an op in each mode; 0: not known */
    uint64_t ops;
} class_times;

/* The class of an op: its `kind` (below OP_CLASSES / SIZES), and its size to a factor of two. */
static inline int class_of(int kind, uint64_t nbytes) {
    int size = 0;
    for (uint64_t limit = 1 << 18; size < SIZES - 1 && nbytes > limit; limit *= 2)
        size++;
    return kind * SIZES + size;
}

/* Record the time of one more op of this class, and publish the preferred mode. `took` is 0 if this rank took
 * nothing, or used both modes. */
static inline void record_time(board *b, class_times *of, int bit, int mode, uint64_t took) {
    uint64_t *best = of->best;
    of->ops++;
    if (took && of->ops >= WARM_UP) {
        uint64_t recent = best[mode] + best[mode] / RETRY_EVERY;
        best[mode] = !recent || took < recent ? took : recent;
    }
    int preferred = !best[STAGED] ? STAGED : !best[IN_PLACE] ? IN_PLACE : best[IN_PLACE] < best[STAGED];
    if (best[STAGED] && best[IN_PLACE] && of->ops % RETRY_EVERY == 0)
        preferred = !preferred;
    word *bits = word_of(b, b->rank, IN_PLACE_BITS);
    uint64_t before = atomic_load_explicit(bits, memory_order_relaxed), one = (uint64_t)1 << bit;
    atomic_store_explicit(bits, preferred ? before | one : before & ~one, memory_order_release);
}

/* Whether all others prefer to read in place. They published that before they began this op. */
static inline int all_prefer_in_place(const board *b, int bit) {
    return all_have_bits(b, IN_PLACE_BITS, (uint64_t)1 << bit);
}

#endif
