/* A collective over a board, from its publication to its end. All of them run here, small and large.
 *
 * A rank publishes the op with its inputs, meets the ranks that it depends on, and takes what is for it from
 * their slots. Inputs that are too large for slots go through the pipeline. An op that would wait for long
 * halts, and says for what; the next call with the same arguments resumes it. */

#ifndef HOLDFAST_RUN_OP_H
#define HOLDFAST_RUN_OP_H

#include <Python.h>

#include "board/pipeline.h"
#include "board/publication.h"

/* The collectives, by the numbers that they have in signatures (comms/ops.py). */
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

/* What keeps an op from its end: see the enumeration of ends. */
typedef struct {
    int why, rank;
    uint64_t value, flag;
} halted;

/* What a `Board` of Python holds. */
typedef struct {
    PyObject_HEAD Py_buffer memory;
    board b;
    pipeline p;
    halted halted;
    uint64_t number;              /* the newest op that is complete */
    uint64_t begun;               /* the newest op that was published */
    const char *from;             /* address of its first input */
    uint64_t signature;           /* what it was published as, without `roots` */
    int copied;                   /* whether its inputs were copied into the slot */
    uint64_t roots, roots_before; /* of all ops so far; of those before the newest one: see `with_roots` */
} Board;

enum { ROOT_BIT = 15, ROOT_MASK = 0xFFF };
enum { ROOTED = 1 << REDUCE | 1 << BROADCAST | 1 << GATHER | 1 << SCATTER };

/* Its inputs are in `p.give`, its outputs in `p.take`: one, or one a rank. */
typedef struct {
    uint64_t signature;
    long kind; /* the reduction; -1 for a move */
} board_op;

/* How a call ends. From WAITS on the op is halted; `halted` tells the rank (-1: all others), and: the flag
 * and its value; an error number; nothing; the size that this rank expects and, as value, the size of the
 * input there is. */
enum { COMPLETE, WAITS, UNREADABLE, OTHER_OP, OTHER_SIZE, ERROR, LARGE };
enum { EVERY_RANK = -1, NO_RANK = -2 };

static inline collective collective_of(uint64_t signature) { return (collective)(signature & 15); }

/* How many inputs this rank has. */
int inputs_of(const Board *self, const board_op *of);

int outputs_of(const Board *self, const board_op *of);

/* Copy, without the GIL from 16 KiB on. */
void move(span into, const void *from);

/* Run the next op of the board, or resume it: see the enumeration of ends. */
int run_op(Board *self, const board_op *of);

#endif
