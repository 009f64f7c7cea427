/* The `Order` type of Python: which thread may issue an op of a communicator. The GIL guards it. */

#ifndef HOLDFAST_ORDER_H
#define HOLDFAST_ORDER_H

#include "module.h"

typedef struct {
    PyObject_HEAD unsigned long long seq, joint; /* ops issued; ops among them that all ranks share */
    unsigned long begun_by; /* thread that has to complete an op begun on a fast path; or 0 */
    unsigned long held_by;  /* thread that issues or runs an op */
    unsigned long refused;  /* `with` blocks of that thread, inside that op, that were not let in */
    PyObject *left;         /* see `run_when_left`; while an op runs */
    char busy, begun;       /* an op is being issued or runs; it was begun on a fast path */
    char over, queued;      /* no more ops can run; some are queued */
    char lost;              /* an op that was begun on a fast path was interrupted, and never completed */
} Order;

/* Calls to make once the calls under way have ended, such as a close that a signal's handler asked for.
 *
 * Add one to the list in `left`, which is made for the first one. True, or NULL with a Python error. */
PyObject *add_when_left(PyObject **left, PyObject *call);

/* Make the calls, and forget them. None, or NULL with the Python error of the last one that failed. An error
 * that is set when this begins stays set, unless one of the calls fails. */
PyObject *run_when_left(PyObject **left);

#endif
