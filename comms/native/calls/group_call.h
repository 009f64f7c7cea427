/* The `GroupCall` type of Python: begin an op on one tensor by a torch process group, and wait for it. */

#ifndef HOLDFAST_GROUP_CALL_H
#define HOLDFAST_GROUP_CALL_H

#include <Python.h>

typedef struct {
    PyObject_HEAD PyObject *holder, *group,
        *op;                   /* the group is an attribute of `holder`, which may drop it */
    PyObject *options, *limit; /* options of the op; timeout of a wait */
    PyObject *failed;          /* called with a RuntimeError */
    PyObject *wait;
} GroupCall;

extern PyType_Spec group_call_spec;

#endif
