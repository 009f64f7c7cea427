/* The `Order` type of Python: which thread may issue an op of a communicator. The GIL guards it. */

#ifndef HOLDFAST_ORDER_H
#define HOLDFAST_ORDER_H

#include <Python.h>

#include "arguments.h"
#include "calls/when_left.h"

typedef struct {
    PyObject_HEAD unsigned long long seq, joint; /* ops issued; ops among them that all ranks share */
    unsigned long begun_by; /* thread that has to complete an op begun on a fast path; or 0 */
    unsigned long held_by;  /* thread that issues or runs an op */
    unsigned long refused;  /* `with` blocks of that thread, inside that op, that were not let in */
    PyObject *left;         /* see when_left.h; while an op runs */
    char busy, begun;       /* an op is being issued or runs; it was begun on a fast path */
    char over, queued;      /* no more ops can run; some are queued */
    char lost;              /* an op that was begun on a fast path was interrupted, and never completed */
} Order;

#endif
