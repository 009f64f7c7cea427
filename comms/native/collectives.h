/* The collectives, by the numbers that they have in signatures (comms/plan.py). */

#ifndef HOLDFAST_COLLECTIVES_H
#define HOLDFAST_COLLECTIVES_H

typedef enum {
    ALL_REDUCE = 1,
    REDUCE,
    BROADCAST,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    GATHER,
    SCATTER,
    BARRIER,
    COLLECTIVES
} collective;

static inline int is_reduction(collective what) {
    return what == ALL_REDUCE || what == REDUCE || what == REDUCE_SCATTER;
}

#endif
