/* The `RequestCall` and `PersistentCall` types of Python: an all_reduce of Open MPI on one tensor, in place,
 * begun and tested until it is complete, or `max_tests` times. `RequestCall` begins a request on the tensor
 * itself; `PersistentCall` has a persistent request of MPI on a buffer of its own, to and from which the
 * tensor is copied.
 *
 * MPI's functions are called by their addresses, so this module is not linked with MPI. MPI's handles are
 * pointers. */

#ifndef HOLDFAST_REQUEST_CALL_H
#define HOLDFAST_REQUEST_CALL_H

#include <Python.h>
#include <string.h>

#include "tensors.h"

typedef void *mpi_handle;
typedef int (*mpi_all_reduce)(const void *, void *, int, mpi_handle, mpi_handle, mpi_handle, mpi_handle *);
typedef int (*mpi_start)(mpi_handle *);
typedef int (*mpi_test)(mpi_handle *, int *, void *);

/* The fields of both. */
typedef struct {
    PyObject_HEAD const tensors *known;
    uint64_t nbytes;          /* size of a tensor */
    PyObject *holder, *count; /* this attribute of `holder` counts collectives */
    PyObject *one;
    mpi_test test;
    int max_tests;
    PyObject *finish_request; /* called with a request that is incomplete or failed */
} request_waits;

typedef struct {
    request_waits waits;
    mpi_all_reduce begin;
    void *place; /* MPI_IN_PLACE */
    int count;
    mpi_handle kind, op, comm;
} RequestCall;

typedef struct {
    request_waits waits;
    mpi_start start;
    PyObject *request;  /* of mpi4py */
    mpi_handle *handle; /* where `request` holds its handle */
    Py_buffer stage;
} PersistentCall;

extern PyType_Spec request_call_spec;

extern PyType_Spec persistent_call_spec;

#endif
