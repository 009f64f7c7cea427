/* The `FastPath` type of Python: usual ops, from the tensors to the result, in one call.
 *
 * Usual means: plain tensors, matching sizes, and no other op before, around or behind. All else takes the
 * slow path, which runs or refuses it. What an op needs is asked of Python once, as a plan, and cached: over
 * a board its signature and reduction, else a function that is called with the tensors and a deadline. */

#ifndef HOLDFAST_FAST_PATH_H
#define HOLDFAST_FAST_PATH_H

#include <time.h>

#include "board/run_op.h"
#include "calls/order.h"

/* The usual ops: their names, and the number of arguments with the reduction or the root, which is the last
 * one. */
static const struct {
    const char *name;
    int arguments;
} usual[COLLECTIVES] = {
    [ALL_REDUCE] = {"all_reduce", 2},        [REDUCE_SCATTER] = {"reduce_scatter_single", 3},
    [BROADCAST] = {"broadcast", 2},          [ALL_GATHER] = {"all_gather_single", 2},
    [ALL_TO_ALL] = {"all_to_all_single", 2}, [BARRIER] = {"barrier", 0},
};

enum { PLANS = 64 };
/* Results: nothing was done; the op is complete; the slow path has to complete it; a Python error is set. */
enum { DECLINED, COMPLETED, STARTED, RAISED };

typedef struct {
    uint64_t what, count, root; /* the op, and the dtype as torch calls it; number of elements */
    PyObject *reduction, *detail,
        *answer; /* detail: for the journal; answer: None if the op is not for a fast path */
    board_op on_board;
} plan;

typedef struct {
    PyObject *itself;
    dlpack_tensor where;
    uint64_t nbytes, count, dtype;
} operand;

typedef struct {
    collective op;
    operand tensor, output; /* as far as the op has them */
    long src;
    int asynchronous;
    const plan *as;
    PyObject *work; /* what the function returned; the caller owns it */
} fast_call;

typedef struct {
    PyObject_HEAD Order *order;
    PyObject *planner;              /* called for plans */
    PyObject *observers, *observed; /* `observers.observed` tells whether any observer watches ops */
    PyObject *enter, *leave;        /* of the journal, or NULL */
    PyObject *names[COLLECTIVES];
    const tensors *known;
    dlpack_device device; /* of the tensors */
    int rank, size;
    Board *board;     /* NULL: ops are functions */
    PyObject *failed; /* called with the error of a function; raises */
    PyObject *done;   /* the work of an op that is complete */
    double timeout;
    plan plans[PLANS];
} fast_path;

/* Run an op of these arguments; if `unchanged`, `call` holds what was found out about them before. */
int run_call(fast_path *self, fast_call *call, PyObject *const *args, int unchanged);

#endif
