/* The `OpCall` type of Python: the ops of one plan over another library, each started, polled until it is
 * complete, and continued by the slow path if it takes longer or fails.
 *
 * `start(*tensors, deadline)` returns a request, or None if the op is complete. `is_complete(request)` is
 * called up to `polls` times; then, or after a RuntimeError, `finish_late(request, error, *tensors,
 * deadline)` completes the op or raises. The loop is compiled: after a switch of threads bytecodes are in no
 * cache, and fifty of them take 8 us.
 *
 * With a `stage`, a buffer, the op runs on that: the first tensor is copied to it and back. With `under_way`,
 * a list in which `start` keeps what the op accesses, that list is empty once the op is complete. */

#define PY_SSIZE_T_CLEAN
#include "module.h"

typedef struct {
    PyObject_HEAD const tensors *known;
    PyObject *start, *is_complete, *finish_late, *under_way;
    int polls;
    Py_buffer stage; /* stage.obj is NULL if there is none */
} OpCall;

static int op_call_init(PyObject *object, PyObject *args, PyObject *named) {
    OpCall *self = (OpCall *)object;
    static char *names[] = {"start", "is_complete", "finish_late", "polls", "stage", "under_way", NULL};
    PyObject *start, *is_complete, *finish_late, *stage = Py_None, *under_way = NULL;
    self->polls = 1;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OOO|iOO!", names, &start, &is_complete, &finish_late,
                                     &self->polls, &stage, &PyList_Type, &under_way) ||
        (stage != Py_None && PyObject_GetBuffer(stage, &self->stage, PyBUF_WRITABLE) < 0))
        return -1;
    self->known = &((state *)PyType_GetModuleState(Py_TYPE(object)))->known;
    self->start = Py_NewRef(start), self->is_complete = Py_NewRef(is_complete);
    self->finish_late = Py_NewRef(finish_late), self->under_way = Py_XNewRef(under_way);
    return 0;
}

/* Find the memory of the first tensor, which has the size of the stage. 0, or -1 with a Python error. */
static int find_staged(const OpCall *self, PyObject *args, char **data) {
    uint64_t nbytes, expected = (uint64_t)self->stage.len;
    PyObject *tensor = PyTuple_GetItem(args, 0);
    if (!tensor || find_tensor(self->known, tensor, data, &nbytes) < 0)
        return -1;
    if (nbytes == expected)
        return 0;
    PyErr_Format(PyExc_ValueError, "the tensor has %llu bytes, and the call was prepared for %llu",
                 (unsigned long long)nbytes, (unsigned long long)expected);
    return -1;
}

/* 1 once the request is complete, 0 if it was not for all polls, -1 with a Python error. */
static int poll(const OpCall *self, PyObject *request) {
    for (int i = 0; i < self->polls; i++) {
        PyObject *answer = PyObject_CallFunctionObjArgs(self->is_complete, request, NULL);
        if (!answer || !is_false(answer))
            return answer ? 1 : -1;
    }
    return 0;
}

/* Call `finish_late` with a RuntimeError that is set, or None for one. Any other error stays set. */
static PyObject *finish(const OpCall *self, PyObject *request, PyObject *args) {
    PyObject *type = NULL, *error = NULL, *traceback = NULL, *done = NULL;
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
            return NULL;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
    }
    PyObject *first = PyTuple_Pack(2, request ? request : Py_None, error ? error : Py_None);
    PyObject *all = first ? PySequence_Concat(first, args) : NULL;
    if (all)
        done = PyObject_CallObject(self->finish_late, all);
    PyObject *held[] = {first, all, type, error, traceback};
    for (int i = 0; i < 5; i++)
        Py_XDECREF(held[i]);
    return done;
}

/* call(*tensors, deadline) */
static PyObject *op_call(PyObject *object, PyObject *args, PyObject *named) {
    OpCall *self = (OpCall *)object;
    char *data = NULL;
    (void)named;
    if (self->stage.obj && find_staged(self, args, &data) < 0)
        return NULL;
    if (data)
        memcpy(self->stage.buf, data, (size_t)self->stage.len);
    PyObject *request = PyObject_CallObject(self->start, args);
    int complete = !request ? -1 : request == Py_None ? 1 : poll(self, request);
    PyObject *done = complete > 0 ? Py_NewRef(Py_None) : finish(self, request, args);
    if (done && data)
        memcpy(data, self->stage.buf, (size_t)self->stage.len);
    if (done && self->under_way && PyList_SetSlice(self->under_way, 0, PY_SSIZE_T_MAX, NULL) < 0)
        Py_CLEAR(done);
    Py_XDECREF(request);
    Py_XDECREF(done);
    return done ? Py_NewRef(Py_None) : NULL;
}

static void op_call_dealloc(PyObject *object) {
    OpCall *self = (OpCall *)object;
    PyBuffer_Release(&self->stage);
    Py_XDECREF(self->start);
    Py_XDECREF(self->is_complete);
    Py_XDECREF(self->finish_late);
    Py_XDECREF(self->under_way);
    free_object(object);
}

static PyType_Slot op_call_slots[] = {
    {Py_tp_init, op_call_init},
    {Py_tp_dealloc, op_call_dealloc},
    {Py_tp_call, op_call},
    {0, NULL},
};

PyType_Spec op_call_spec = {"holdfast.comms._native.OpCall", sizeof(OpCall), 0, Py_TPFLAGS_DEFAULT,
                            op_call_slots};
