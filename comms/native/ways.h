/* Two ways for a large op to bring a rank what others give: staged, where every byte is copied twice, by the ranks; or read
 * where it is, where the kernel copies it once and looks for every page of it. Which is faster depends on processor, kernel
 * and size: on AMD's Zen 3 one is by up to two thirds, on Intel's Ice Lake the other by as much.
 *
 * So every rank takes the time of its ops, by their kind and size, and says which way it wants the next of that sort. One
 * that writes goes the way that all others want. The other way is tried now and then: machines change. */

#ifndef HOLDFAST_WAYS_H
#define HOLDFAST_WAYS_H

#include "board.h"

enum { STAGED, IN_PLACE };
enum { SORTS = 32, SIZES = 8, TRIED_EVERY = 64, WARM_UP = 2 }; /* the first op of a sort touches memory for the first time */

typedef struct {
    uint64_t least[2]; /* nanoseconds that an op took each way, lately; 0: not known */
    uint64_t ops;
} times;

/* Ops of one sort are alike in what ranks do (`kind`, below SORTS / SIZES) and, within a factor of two, in size. */
static inline int sort_of(int kind, uint64_t nbytes) {
    int size = 0;
    for (uint64_t reach = 1 << 18; size < SIZES - 1 && nbytes > reach; reach *= 2)
        size++;
    return kind * SIZES + size;
}

/* Another op of this sort took so long (0: this rank took nothing, or not all in one way). Say which way is wanted next. */
static inline void want(board *b, times *sort, int bit, int way, uint64_t took) {
    uint64_t *least = sort->least;
    sort->ops++;
    if (took && sort->ops >= WARM_UP) {
        uint64_t lately = least[way] + least[way] / TRIED_EVERY;
        least[way] = !lately || took < lately ? took : lately;
    }
    int wanted = !least[STAGED] ? STAGED : !least[IN_PLACE] ? IN_PLACE : least[IN_PLACE] < least[STAGED];
    if (least[STAGED] && least[IN_PLACE] && sort->ops % TRIED_EVERY == 0)
        wanted = !wanted;
    word *said = word_of(b, b->rank, WANTED);
    uint64_t before = atomic_load_explicit(said, memory_order_relaxed), one = (uint64_t)1 << bit;
    atomic_store_explicit(said, wanted ? before | one : before & ~one, memory_order_release);
}

/* Whether all others want to read what this rank gives. They said so before they began this op. */
static inline int all_want(const board *b, int bit) { return all_say(b, WANTED, (uint64_t)1 << bit); }

#endif
