/* Large collectives as a pipeline of blocks through shared memory.
 *
 * In a *move* every rank stages its blocks for the others (`give`), and each copies what it is to get out of the others'
 * stages, or reduces it into its own (`take`). In an *all_reduce* each rank owns a part: blocks are given to their owner,
 * who adds them up and stages the result (`reduce`), which the others take. A rank may be `depth` blocks ahead of another.
 *
 * `run` stops where a rank has to wait for long, and goes on from there when it is called again. Before it begins, every
 * rank must know that all have completed the ops before: nothing in a stage is still to be read then. */

#ifndef HOLDFAST_PIPELINE_H
#define HOLDFAST_PIPELINE_H

#include "distance.h"
#include "kernels.h"

typedef struct {
    board *b;
    span *give, *take; /* give[d]: this rank's bytes for d (for itself: for all); take[s]: where those of s belong */
    const char *own;   /* of a reducing move: this rank's own input to what it takes */
    int reduces_all, shared, near;
    distance heard;
    kernel combine;
    uint64_t itemsize, block, steps, base;
    uint64_t step; /* where it has got to: step, what is being done in it, and for which of the others */
    int phase, other;
    int awaited, flag; /* what it waits for */
    uint64_t value;
} pipeline;

static inline span block_of(const pipeline *p, span whole, uint64_t step) {
    uint64_t start = step * p->block;
    span none = {whole.at, 0};
    if (start >= whole.nbytes)
        return none;
    span part = {whole.at + start, whole.nbytes - start < p->block ? whole.nbytes - start : p->block};
    return part;
}

/* Whether `rank` has reached block `value` of this op, counted from 1. */
static inline int has(pipeline *p, int rank, int flag, int64_t value) {
    if (value <= 0)
        return 1;
    p->awaited = rank, p->flag = flag, p->value = p->base + (uint64_t)value;
    if (look(p->b, rank, flag, p->value, p->b->spins, p->b->yields) >= 0 && doze(p->b, rank, flag, p->value) >= 0)
        return 0;
    if (flag == GIVEN && value == 1)
        listen(p->b, &p->heard, rank);
    return 1;
}

static inline void stage(pipeline *p, int to, uint64_t step, span part) {
    char *place = staged(p->b, p->b->rank, to, step);
    if (p->near)
        copy_bytes(place, part.at, part.nbytes);
    else
        stream(place, part.at, part.nbytes);
}

static inline int nth(const pipeline *p) { return (p->b->rank + p->other) % p->b->size; }

static int give(pipeline *p, uint64_t step) {
    board *b = p->b;
    for (; p->other < b->size; p->other++) {
        int to = nth(p);
        span part = block_of(p, p->give[p->shared ? b->rank : to], step);
        if (!part.nbytes)
            continue;
        if (!has(p, to, p->reduces_all ? REDUCED : TAKEN, (int64_t)step + 1 - b->depth))
            return 0;
        if (!p->shared || p->other == b->size - 1)
            stage(p, p->shared ? b->rank : to, step, part);
    }
    raise_flag(b, GIVEN, p->base + step + 1);
    return 1;
}

static int reduce(pipeline *p, uint64_t step) {
    board *b = p->b;
    span mine = block_of(p, p->take[b->rank], step);
    for (; p->other < b->size; p->other++) {
        int from = nth(p);
        if (!has(p, from, GIVEN, (int64_t)step + 1) || !has(p, from, TAKEN, (int64_t)step + 1 - b->depth))
            return 0;
        p->combine(mine.at, p->other == 1 ? block_of(p, p->give[b->rank], step).at : mine.at,
                   staged(b, from, b->rank, step), mine.nbytes / p->itemsize);
    }
    stage(p, b->rank, step, mine);
    raise_flag(b, REDUCED, p->base + step + 1);
    return 1;
}

static int take(pipeline *p, uint64_t step) {
    board *b = p->b;
    for (; p->other < b->size; p->other++) {
        int from = nth(p);
        span part = block_of(p, p->take[p->combine && !p->reduces_all ? b->rank : from], step);
        if (!part.nbytes)
            continue;
        if (!has(p, from, p->reduces_all ? REDUCED : GIVEN, (int64_t)step + 1))
            return 0;
        const char *block = staged(b, from, p->reduces_all || p->shared ? from : b->rank, step);
        if (p->combine && !p->reduces_all)
            p->combine(part.at, p->other == 1 ? p->own + step * p->block : part.at, block, part.nbytes / p->itemsize);
        else
            copy_bytes(part.at, block, part.nbytes);
    }
    raise_flag(b, TAKEN, p->base + step + 1);
    return 1;
}

/* Go on until the op is complete (1), or has waited for long (0). */
static int run(pipeline *p) {
    int last = p->reduces_all ? 2 : 1;
    for (; p->step < p->steps + (uint64_t)last; p->step++, p->phase = 0) {
        for (; p->phase <= last; p->phase++, p->other = 1) {
            if (p->step < (uint64_t)p->phase || p->step - (uint64_t)p->phase >= p->steps)
                continue;
            uint64_t step = p->step - (uint64_t)p->phase;
            if (atomic_load_explicit(&p->b->stopped, memory_order_relaxed))
                return 0;
            int done = p->phase == 0 ? give(p, step) : p->phase == last ? take(p, step) : reduce(p, step);
            if (!done)
                return 0;
        }
    }
    tell_distance(p->b, &p->heard);
    if (!p->reduces_all)
        raise_flag(p->b, REDUCED, p->base + p->steps);
    return 1;
}

#endif
