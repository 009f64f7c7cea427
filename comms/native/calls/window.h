/* Types of Python that begin a call on a window: `ActiveCalls` counts the calls under way, `WindowBounds`
 * checks that a transfer fits. The GIL guards both. */

#ifndef HOLDFAST_WINDOW_H
#define HOLDFAST_WINDOW_H

#include <Python.h>
#include <structmember.h>

#include "arguments.h"
#include "calls/when_left.h"
#include "tensors.h"

typedef struct {
    PyObject_HEAD const tensors *known;
    PyObject *refusal; /* makes the error of a call after the end */
    PyObject *tensor;  /* the exposed tensor, or NULL; its address and size at first; `moved` makes the error
                          if they change */
    PyObject *moved;
    char *address;
    uint64_t nbytes;
    Py_ssize_t running;
    unsigned long entered_by; /* the thread whose call began last; 0 once that has ended */
    PyObject *left;           /* see when_left.h; while calls run */
    char over;
} ActiveCalls;

typedef struct {
    PyObject_HEAD const tensors *known;
    uint64_t *sizes; /* size of each rank's window in bytes */
    Py_ssize_t ranks;
    uint64_t itemsize;
    int32_t dtype; /* as torch calls it */
} WindowBounds;

extern PyType_Spec calls_spec;

extern PyType_Spec bounds_spec;

#endif
