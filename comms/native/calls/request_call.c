#define PY_SSIZE_T_CLEAN
#include "calls/request_call.h"

/* -- from the beginning of a call to its end */

static int waits_init(request_waits *self, uint64_t nbytes, PyObject *holder, PyObject *count,
                      unsigned long long test, int max_tests, PyObject *finish_request) {
    self->known = &((state *)PyType_GetModuleState(Py_TYPE((PyObject *)self)))->known;
    self->nbytes = nbytes, self->test = (mpi_test)(uintptr_t)test, self->max_tests = max_tests;
    self->holder = Py_NewRef(holder), self->count = Py_NewRef(count),
    self->finish_request = Py_NewRef(finish_request);
    self->one = PyLong_FromLong(1);
    return self->one ? 0 : -1;
}

/* Parse the arguments of call(tensor, deadline) and count the call. 0, or -1 with a Python error. */
static int take_call(request_waits *self, PyObject *args, PyObject **tensor, char **data,
                     PyObject **deadline) {
    uint64_t nbytes;
    if (!PyArg_UnpackTuple(args, "a call", 2, 2, tensor, deadline) ||
        find_tensor(self->known, *tensor, data, &nbytes) < 0)
        return -1;
    if (nbytes != self->nbytes) {
        PyErr_Format(PyExc_ValueError, "the tensor has %llu bytes, and the call was prepared for %llu",
                     (unsigned long long)nbytes, (unsigned long long)self->nbytes);
        return -1;
    }
    PyObject *before = PyObject_GetAttr(self->holder, self->count);
    PyObject *now = before ? PyNumber_Add(before, self->one) : NULL;
    int failed = !now || PyObject_SetAttr(self->holder, self->count, now) < 0;
    Py_XDECREF(before);
    Py_XDECREF(now);
    return failed ? -1 : 0;
}

/* Whether a begun request completes within `max_tests` tests. MPI's error code is put into `code`. */
static int test_request(const request_waits *self, mpi_handle *request, int *code) {
    int complete = 0;
    for (int i = 0; i < self->max_tests && !complete && !*code; i++)
        *code = self->test(request, &complete, NULL);
    return complete && !*code;
}

/* None for a complete call; otherwise `finish_request` completes it. `request` is NULL if it was not begun.
 */
static PyObject *end_call(request_waits *self, int complete, mpi_handle request, int code, PyObject *memory,
                          PyObject *deadline) {
    if (complete)
        return Py_NewRef(Py_None);
    PyObject *handle = PyLong_FromVoidPtr(request), *status = PyLong_FromLong(code), *done = NULL;
    if (handle && status)
        done = PyObject_CallFunctionObjArgs(self->finish_request, handle, status, memory, deadline, NULL);
    Py_XDECREF(handle);
    Py_XDECREF(status);
    return done;
}

static void request_dealloc(request_waits *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject *held[] = {self->holder, self->count, self->one, self->finish_request};
    for (int i = 0; i < 4; i++)
        Py_XDECREF(held[i]);
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_(self);
    Py_DECREF(type);
}

/* -- a request on the tensor */

static int request_call_init(PyObject *object, PyObject *args, PyObject *named) {
    RequestCall *self = (RequestCall *)object;
    static char *names[] = {"holder", "count", "nbytes", "begin",     "place",          "elements", "kind",
                            "op",     "comm",  "test",   "max_tests", "finish_request", NULL};
    PyObject *holder, *count, *finish_request;
    unsigned long long nbytes, begin, place, kind, op, comm, test;
    int max_tests;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OUKKKiKKKKiO", names, &holder, &count, &nbytes, &begin,
                                     &place, &self->count, &kind, &op, &comm, &test, &max_tests,
                                     &finish_request))
        return -1;
    self->begin = (mpi_all_reduce)(uintptr_t)begin, self->place = (void *)(uintptr_t)place;
    self->kind = (mpi_handle)(uintptr_t)kind, self->op = (mpi_handle)(uintptr_t)op,
    self->comm = (mpi_handle)(uintptr_t)comm;
    return waits_init(&self->waits, nbytes, holder, count, test, max_tests, finish_request);
}

/* call(tensor, deadline) */
static PyObject *request_call(PyObject *object, PyObject *args, PyObject *named) {
    RequestCall *self = (RequestCall *)object;
    PyObject *tensor, *deadline;
    char *data;
    (void)named;
    if (take_call(&self->waits, args, &tensor, &data, &deadline) < 0)
        return NULL;
    mpi_handle request = NULL;
    int code, begun, complete = 0;
    Py_BEGIN_ALLOW_THREADS code =
        self->begin(self->place, data, self->count, self->kind, self->op, self->comm, &request);
    begun = !code;
    if (begun)
        complete = test_request(&self->waits, &request, &code);
    Py_END_ALLOW_THREADS return end_call(&self->waits, complete, begun ? request : NULL, code, tensor,
                                         deadline);
}

static void request_call_dealloc(PyObject *object) { request_dealloc((request_waits *)object); }

static PyType_Slot request_call_slots[] = {
    {Py_tp_init, request_call_init},
    {Py_tp_dealloc, request_call_dealloc},
    {Py_tp_call, request_call},
    {0, NULL},
};

PyType_Spec request_call_spec = {
    "holdfast.comms._native.RequestCall", sizeof(RequestCall), 0, Py_TPFLAGS_DEFAULT, request_call_slots,
};

/* -- a persistent request on a buffer */

static int persistent_call_init(PyObject *object, PyObject *args, PyObject *named) {
    PersistentCall *self = (PersistentCall *)object;
    static char *names[] = {"holder", "count", "stage",     "start",          "request",
                            "handle", "test",  "max_tests", "finish_request", NULL};
    PyObject *holder, *count, *stage, *request, *finish_request;
    unsigned long long start, handle, test;
    int max_tests;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OUOKOKKiO", names, &holder, &count, &stage, &start,
                                     &request, &handle, &test, &max_tests, &finish_request) ||
        PyObject_GetBuffer(stage, &self->stage, PyBUF_WRITABLE) < 0)
        return -1;
    self->start = (mpi_start)(uintptr_t)start, self->handle = (mpi_handle *)(uintptr_t)handle;
    self->request = Py_NewRef(request);
    return waits_init(&self->waits, (uint64_t)self->stage.len, holder, count, test, max_tests,
                      finish_request);
}

/* call(tensor, deadline) */
static PyObject *persistent_call(PyObject *object, PyObject *args, PyObject *named) {
    PersistentCall *self = (PersistentCall *)object;
    PyObject *tensor, *deadline;
    char *data;
    (void)named;
    if (take_call(&self->waits, args, &tensor, &data, &deadline) < 0)
        return NULL;
    int code, begun, complete = 0;
    Py_BEGIN_ALLOW_THREADS memcpy(self->stage.buf, data, self->waits.nbytes);
    code = self->start(self->handle);
    begun = !code;
    if (begun)
        complete = test_request(&self->waits, self->handle, &code);
    Py_END_ALLOW_THREADS PyObject *done =
        end_call(&self->waits, complete, begun ? *self->handle : NULL, code, self->stage.obj, deadline);
    if (done)
        memcpy(data, self->stage.buf, self->waits.nbytes);
    return done;
}

static void persistent_call_dealloc(PyObject *object) {
    PersistentCall *self = (PersistentCall *)object;
    PyBuffer_Release(&self->stage);
    Py_XDECREF(self->request);
    request_dealloc(&self->waits);
}

static PyType_Slot persistent_call_slots[] = {
    {Py_tp_init, persistent_call_init},
    {Py_tp_dealloc, persistent_call_dealloc},
    {Py_tp_call, persistent_call},
    {0, NULL},
};

PyType_Spec persistent_call_spec = {
    "holdfast.comms._native.PersistentCall",
    sizeof(PersistentCall),
    0,
    Py_TPFLAGS_DEFAULT,
    persistent_call_slots,
};
