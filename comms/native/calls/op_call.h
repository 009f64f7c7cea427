/* The `OpCall` type of Python: the ops of one plan over another library, each started, polled until it is
 * complete, and continued by the slow path if it takes longer or fails.
 *
 * `start(*tensors, deadline)` returns a request, or None if the op is complete. `is_complete(request)` is
 * called up to `polls` times; then, or after a RuntimeError, `finish_late(request, error, *tensors,
 * deadline)` completes the op or raises. The loop is compiled: after a switch of threads bytecodes are in no
 * cache, and fifty of them take 8 us.
 *
 * With a `stage`, a buffer, the op runs on that: the first tensor is copied to it and back. */

#ifndef HOLDFAST_OP_CALL_H
#define HOLDFAST_OP_CALL_H

#include <Python.h>

#include "tensors.h"

typedef struct {
    PyObject_HEAD const tensors *known;
    PyObject *start, *is_complete, *finish_late;
    int polls;
    Py_buffer stage; /* stage.obj is NULL if there is none */
} OpCall;

extern PyType_Spec op_call_spec;

#endif
