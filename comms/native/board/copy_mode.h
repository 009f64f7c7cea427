/* Two ways for a large op to bring a rank what others give: staged, where every byte is copied twice, by the ranks; or read
 * where it is, where the kernel copies it once and looks for every page of it. Which is faster depends on processor, kernel
 * and size: on AMD's Zen 3 one is by up to two thirds, on Intel's Ice Lake the other by as much.
 *
 * So every rank takes the time of its ops, by their kind and size, and says which way it wants the next of that sort. One
 * that writes goes the way that all others want. The other way is tried now and then: machines change. */

#ifndef HOLDFAST_COPY_MODE_H
#define HOLDFAST_COPY_MODE_H

#include "board/board.h"

enum { STAGED, IN_PLACE };
enum { OP_CLASSES = 32, SIZES = 8, RETRY_EVERY = 64, WARM_UP = 2 }; /* the first op of a sort touches memory for the first time */

typedef struct {
    uint64_t best[2]; /* nanoseconds that an op took each way, lately; 0: not known */
    uint64_t ops;
} class_times;

/* Ops of one sort are alike in what ranks do (`kind`, below SORTS / SIZES) and, within a factor of two, in size. */
static inline int class_of(int kind, uint64_t nbytes) {
    int size = 0;
    for (uint64_t limit = 1 << 18; size < SIZES - 1 && nbytes > limit; limit *= 2)
        size++;
    return kind * SIZES + size;
}

/* Another op of this sort took so long (0: this rank took nothing, or not all in one way). Say which way is wanted next. */
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

/* Whether all others want to read what this rank gives. They said so before they began this op. */
static inline int all_prefer_in_place(const board *b, int bit) { return all_have_bits(b, IN_PLACE_BITS, (uint64_t)1 << bit); }

#endif
