/* The `RequestCall` and the `PersistentCall` of Python: a collective of MPI on one tensor, in place, begun and looked at until
 * it is complete, or for as long as looking is all that one does. The first begins a request on the tensor itself; the other
 * has one that MPI keeps (a persistent one), on memory of its own that the tensor is copied to and from. */

#ifndef HOLDFAST_REQUEST_CALL_H
#define HOLDFAST_REQUEST_CALL_H

#include <Python.h>
#include <string.h>

#include "tensors.h"

/* What a call needs once it is begun. */
typedef struct {
    PyObject_HEAD
    const tensors *known;
    PyObject *holder, *count; /* its attribute counts collectives */
    PyObject *go_on;          /* is told of what is not complete, or failed */
    PyObject *test, *one;
    int looks;
} request_waits;

typedef struct {
    request_waits waits;
    PyObject *start, *place, *kind, *op, *memory; /* start(place, [memory(address, nbytes), kind], op) */
} RequestCall;

typedef struct {
    request_waits waits;
    PyObject *request, *start; /* request.start(), on these bytes */
    Py_buffer bytes;
} PersistentCall;

/* -- from the beginning of a request to its end */

static int waits_init(request_waits *self, PyObject *holder, PyObject *count, PyObject *go_on, int looks) {
    self->holder = Py_NewRef(holder), self->count = Py_NewRef(count), self->go_on = Py_NewRef(go_on), self->looks = looks;
    self->known = &((state *)PyType_GetModuleState(Py_TYPE((PyObject *)self)))->known;
    self->test = PyUnicode_InternFromString("Test"), self->one = PyLong_FromLong(1);
    return self->test && self->one ? 0 : -1;
}

static int count_one(request_waits *self) {
    PyObject *before = PyObject_GetAttr(self->holder, self->count);
    PyObject *now = before ? PyNumber_Add(before, self->one) : NULL;
    int failed = !now || PyObject_SetAttr(self->holder, self->count, now) < 0;
    Py_XDECREF(before);
    Py_XDECREF(now);
    return failed ? -1 : 0;
}

/* 1 if it is complete, 0 if not within so many looks; -1 with a Python error. */
static int look_at(request_waits *self, PyObject *request) {
    for (int i = 0; i < self->looks; i++) {
        PyObject *complete = PyObject_CallMethodObjArgs(request, self->test, NULL);
        int done = complete ? complete == Py_True : -1;
        Py_XDECREF(complete);
        if (done)
            return done;
    }
    return 0;
}

/* None once a request is complete that was begun on `memory`; NULL with a Python error. With no request there is one. */
static PyObject *complete_request(request_waits *self, PyObject *request, PyObject *memory, PyObject *deadline) {
    PyObject *type = NULL, *error = NULL, *traceback = NULL, *said = NULL;
    int done = request ? look_at(self, request) : -1;
    if (done < 0) {
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
    }
    if (done <= 0)
        said = PyObject_CallFunctionObjArgs(self->go_on, request ? request : Py_None, error ? error : Py_None, memory,
                                            deadline, NULL);
    PyObject *held[] = {type, error, traceback, said};
    for (int i = 0; i < 4; i++)
        Py_XDECREF(held[i]);
    return done > 0 || said ? Py_NewRef(Py_None) : NULL;
}

static void request_dealloc(request_waits *self, PyObject *const *held, int count) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject *common[] = {self->holder, self->count, self->go_on, self->test, self->one};
    for (int i = 0; i < 5; i++)
        Py_XDECREF(common[i]);
    for (int i = 0; i < count; i++)
        Py_XDECREF(held[i]);
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_(self);
    Py_DECREF(type);
}

/* -- a request on the tensor */

static int request_call_init(PyObject *object, PyObject *args, PyObject *named) {
    RequestCall *self = (RequestCall *)object;
    static char *names[] = {"holder", "count", "start", "place", "kind", "op", "memory", "go_on", "looks", NULL};
    PyObject *holder, *count, *go_on, *given[5];
    int looks;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OUOOOOOOi", names, &holder, &count, &given[0], &given[1], &given[2],
                                     &given[3], &given[4], &go_on, &looks))
        return -1;
    self->start = Py_NewRef(given[0]), self->place = Py_NewRef(given[1]), self->kind = Py_NewRef(given[2]);
    self->op = Py_NewRef(given[3]), self->memory = Py_NewRef(given[4]);
    return waits_init(&self->waits, holder, count, go_on, looks);
}

/* A request; NULL with a Python error. */
static PyObject *start_request(RequestCall *self, PyObject *tensor) {
    PyObject *where = span_of_tensor(self->waits.known, tensor), *request = NULL;
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

/* call(tensor, deadline) */
static PyObject *request_call(PyObject *object, PyObject *args, PyObject *named) {
    RequestCall *self = (RequestCall *)object;
    PyObject *tensor, *deadline;
    (void)named;
    if (!PyArg_UnpackTuple(args, "RequestCall", 2, 2, &tensor, &deadline) || count_one(&self->waits) < 0)
        return NULL;
    PyObject *request = start_request(self, tensor);
    PyObject *done = complete_request(&self->waits, request, tensor, deadline);
    Py_XDECREF(request);
    return done;
}

static void request_call_dealloc(PyObject *object) {
    RequestCall *self = (RequestCall *)object;
    PyObject *held[] = {self->start, self->place, self->kind, self->op, self->memory};
    request_dealloc(&self->waits, held, 5);
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

/* -- a persistent request on memory of its own */

static int persistent_call_init(PyObject *object, PyObject *args, PyObject *named) {
    PersistentCall *self = (PersistentCall *)object;
    static char *names[] = {"holder", "count", "request", "stage", "go_on", "looks", NULL};
    PyObject *holder, *count, *request, *stage, *go_on;
    int looks;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OUOOOi", names, &holder, &count, &request, &stage, &go_on, &looks) ||
        PyObject_GetBuffer(stage, &self->bytes, PyBUF_WRITABLE) < 0)
        return -1;
    self->request = Py_NewRef(request), self->start = PyUnicode_InternFromString("Start");
    return self->start ? waits_init(&self->waits, holder, count, go_on, looks) : -1;
}

/* call(tensor, deadline) */
static PyObject *persistent_call(PyObject *object, PyObject *args, PyObject *named) {
    PersistentCall *self = (PersistentCall *)object;
    PyObject *tensor, *deadline;
    char *data;
    uint64_t nbytes;
    (void)named;
    if (!PyArg_UnpackTuple(args, "PersistentCall", 2, 2, &tensor, &deadline) ||
        find_tensor(self->waits.known, tensor, &data, &nbytes) < 0)
        return NULL;
    if (nbytes != (uint64_t)self->bytes.len)
        return PyErr_Format(PyExc_ValueError, "a tensor of %llu bytes, where there is room for %zd", nbytes, self->bytes.len);
    if (count_one(&self->waits) < 0)
        return NULL;
    memcpy(self->bytes.buf, data, nbytes);
    PyObject *begun = PyObject_CallMethodObjArgs(self->request, self->start, NULL);
    PyObject *done = complete_request(&self->waits, begun ? self->request : NULL, self->bytes.obj, deadline);
    if (done)
        memcpy(data, self->bytes.buf, nbytes);
    Py_XDECREF(begun);
    return done;
}

static void persistent_call_dealloc(PyObject *object) {
    PersistentCall *self = (PersistentCall *)object;
    PyObject *held[] = {self->request, self->start};
    PyBuffer_Release(&self->bytes);
    request_dealloc(&self->waits, held, 2);
}

static PyType_Slot persistent_call_slots[] = {
    {Py_tp_init, persistent_call_init},
    {Py_tp_dealloc, persistent_call_dealloc},
    {Py_tp_call, persistent_call},
    {0, NULL},
};

static PyType_Spec persistent_call_spec = {
    "holdfast.comms._native.PersistentCall", sizeof(PersistentCall), 0, Py_TPFLAGS_DEFAULT, persistent_call_slots,
};

#endif
