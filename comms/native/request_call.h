/* The `RequestCall` of Python: a collective of MPI on one tensor, in place, begun and looked at until it is complete, or for
 * as long as looking is all that one does. */

#ifndef HOLDFAST_REQUEST_CALL_H
#define HOLDFAST_REQUEST_CALL_H

#include <Python.h>

#include "tensors.h"

enum { REQUEST_CALL_ARGUMENTS = 8 };

typedef struct {
    PyObject_HEAD
    const tensors *known;
    PyObject *holder, *count;                       /* its attribute counts collectives */
    PyObject *start, *place, *kind, *op, *memory;   /* start(place, [memory(address, nbytes), kind], op) */
    PyObject *go_on;                                /* is told of what is not complete, or failed */
    PyObject *test, *one;
    int looks;
} RequestCall;

static int request_call_init(PyObject *object, PyObject *args, PyObject *named) {
    RequestCall *self = (RequestCall *)object;
    static char *names[] = {"holder", "count", "start", "place", "kind", "op", "memory", "go_on", "looks", NULL};
    state *made = PyType_GetModuleState(Py_TYPE(object));
    if (!PyArg_ParseTupleAndKeywords(args, named, "OUOOOOOOi", names, &self->holder, &self->count, &self->start, &self->place,
                                     &self->kind, &self->op, &self->memory, &self->go_on, &self->looks))
        return -1;
    PyObject *held[] = {self->holder, self->count, self->start, self->place, self->kind, self->op, self->memory, self->go_on};
    for (int i = 0; i < REQUEST_CALL_ARGUMENTS; i++)
        Py_INCREF(held[i]);
    self->known = &made->known;
    self->test = PyUnicode_InternFromString("Test"), self->one = PyLong_FromLong(1);
    return self->test && self->one ? 0 : -1;
}

static int count_one(RequestCall *self) {
    PyObject *before = PyObject_GetAttr(self->holder, self->count);
    PyObject *now = before ? PyNumber_Add(before, self->one) : NULL;
    int failed = !now || PyObject_SetAttr(self->holder, self->count, now) < 0;
    Py_XDECREF(before);
    Py_XDECREF(now);
    return failed ? -1 : 0;
}

/* A request; NULL with a Python error. */
static PyObject *start_request(RequestCall *self, PyObject *tensor) {
    PyObject *where = span_of_tensor(self->known, tensor), *request = NULL;
    PyObject *memory = where ? PyObject_CallObject(self->memory, where) : NULL;
    PyObject *buffer = memory ? PyList_New(2) : NULL;
    if (buffer) {
        PyList_SetItem(buffer, 0, Py_NewRef(memory));
        PyList_SetItem(buffer, 1, Py_NewRef(self->kind));
        request = PyObject_CallFunctionObjArgs(self->start, self->place, buffer, self->op, NULL);
    }
    Py_XDECREF(where);
    Py_XDECREF(memory);
    Py_XDECREF(buffer);
    return request;
}

/* 1 if it is complete, 0 if not within so many looks; -1 with a Python error. */
static int look_at(RequestCall *self, PyObject *request) {
    for (int i = 0; i < self->looks; i++) {
        PyObject *complete = PyObject_CallMethodObjArgs(request, self->test, NULL);
        int done = complete ? complete == Py_True : -1;
        Py_XDECREF(complete);
        if (done)
            return done;
    }
    return 0;
}

/* call(tensor, deadline) */
static PyObject *request_call(PyObject *object, PyObject *args, PyObject *named) {
    RequestCall *self = (RequestCall *)object;
    PyObject *tensor, *deadline, *type = NULL, *error = NULL, *traceback = NULL;
    (void)named;
    if (!PyArg_UnpackTuple(args, "RequestCall", 2, 2, &tensor, &deadline) || count_one(self) < 0)
        return NULL;
    PyObject *request = start_request(self, tensor), *said = NULL;
    int done = request ? look_at(self, request) : -1;
    if (done < 0) {
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
    }
    if (done <= 0)
        said = PyObject_CallFunctionObjArgs(self->go_on, request ? request : Py_None, error ? error : Py_None, tensor,
                                            deadline, NULL);
    PyObject *held[] = {request, type, error, traceback, said};
    for (int i = 0; i < 5; i++)
        Py_XDECREF(held[i]);
    return done > 0 || said ? Py_NewRef(Py_None) : NULL;
}

static void request_call_dealloc(PyObject *object) {
    RequestCall *self = (RequestCall *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *held[] = {self->holder, self->count,  self->start, self->place, self->kind,
                        self->op,     self->memory, self->go_on, self->test,  self->one};
    for (int i = 0; i < REQUEST_CALL_ARGUMENTS + 2; i++)
        Py_XDECREF(held[i]);
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_(object);
    Py_DECREF(type);
}

static PyType_Slot request_call_slots[] = {
    {Py_tp_init, request_call_init},
    {Py_tp_dealloc, request_call_dealloc},
    {Py_tp_call, request_call},
    {0, NULL},
};

static PyType_Spec request_call_spec = {
    "holdfast.comms._native.RequestCall", sizeof(RequestCall), 0, Py_TPFLAGS_DEFAULT, request_call_slots,
};

#endif
