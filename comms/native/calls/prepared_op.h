/* The `PreparedOp` type of Python: one op with its arguments, to be started many times.
 *
 * On a fast path the tensors are checked in full once. Each start then only compares where they lie and how
 * large they are. What the fast path does not take, and a start with options, goes to `general(async_op,
 * timeout)`. */

#ifndef HOLDFAST_PREPARED_OP_H
#define HOLDFAST_PREPARED_OP_H

#include "calls/fast_path.h"

enum { MOST_ARGUMENTS = 3 };

typedef struct {
    PyObject_HEAD fast_path *path; /* NULL: all starts are general */
    PyObject *args[MOST_ARGUMENTS];
    PyObject *general, *done; /* done: what a start returns that is complete */
    fast_call call;
    int checked; /* whether `call` describes the arguments */
} PreparedOp;

extern PyType_Spec prepared_spec;

#endif
