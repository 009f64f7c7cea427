/* The `CallPath` type of Python: fast paths of any transport. The work before and after an op is done here; the op
 * itself is a call of a Python function with the tensors and a deadline. */

#ifndef HOLDFAST_CALL_PATH_H
#define HOLDFAST_CALL_PATH_H

#include <time.h>

#include "calls/fast_path.h"

typedef struct {
    fast_path path;
    PyObject *failed; /* called with the error of an op; raises */
    double timeout;
} CallPath;

static double monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Pass the error of an op to Python, which raises what the caller gets. */
static int raise_failure(CallPath *self, fast_op op, unsigned long long seq, unsigned long long joint) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback)
        PyException_SetTraceback(error, traceback);
    PyObject *nothing = NULL;
    if (leave_journal(&self->path, error) == 0)
        nothing = PyObject_CallFunction(self->failed, "OKKO", self->path.names[op], seq, joint, error);
    if (nothing)
        PyErr_SetString(PyExc_SystemError, "a failure was not raised");
    Py_XDECREF(nothing);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return RAISED;
}

static int call_path_run(fast_path *path, fast_call *call) {
    CallPath *self = (CallPath *)path;
    PyObject *deadline = PyFloat_FromDouble(monotonic() + self->timeout), *done;
    if (!deadline || enter_journal(path, call) < 0) {
        Py_XDECREF(deadline);
        return RAISED;
    }
    unsigned long long seq = ++path->order->seq, joint = ++path->order->joint;
    PyObject *function = Py_NewRef(call->as->answer);
    if (call->output.itself)
        done = PyObject_CallFunctionObjArgs(function, call->output.itself, call->tensor.itself, deadline, NULL);
    else if (call->tensor.itself)
        done = PyObject_CallFunctionObjArgs(function, call->tensor.itself, deadline, NULL);
    else
        done = PyObject_CallFunctionObjArgs(function, deadline, NULL);
    Py_DECREF(function);
    Py_DECREF(deadline);
    Py_XDECREF(done);
    if (!done)
        return raise_failure(self, call->op, seq, joint);
    return leave_journal(path, Py_None) < 0 ? RAISED : COMPLETED;
}

static int call_path_init(PyObject *object, PyObject *args, PyObject *named) {
    CallPath *self = (CallPath *)object;
    static char *names[] = {"rank", "size", "order", "plan", "observers", "journal", "timeout", "failed", "device", NULL};
    dlpack_device device = on_cpu;
    state *made = PyType_GetModuleState(Py_TYPE(object));
    PyObject *order, *planner, *observers, *journal, *failed;
    int rank, size;
    if (!PyArg_ParseTupleAndKeywords(args, named, "iiO!OOOdO|(ii)", names, &rank, &size, made->order, &order, &planner, &observers,
                                     &journal, &self->timeout, &failed, &device.kind, &device.number))
        return -1;
    if (size < 1 || rank < 0 || rank >= size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank");
        return -1;
    }
    self->failed = Py_NewRef(failed);
    self->path.run = call_path_run;
    int made_path = fast_init(&self->path, order, planner, observers, journal, rank, size, &made->known);
    self->path.device = device;
    return made_path;
}

static void call_path_dealloc(PyObject *object) {
    Py_XDECREF(((CallPath *)object)->failed);
    fast_dealloc((fast_path *)object);
}

static PyType_Slot call_path_slots[] = {
    {Py_tp_init, call_path_init},
    {Py_tp_dealloc, call_path_dealloc},
    {Py_tp_methods, fast_methods},
    {0, NULL},
};

static PyType_Spec call_path_spec = {
    "holdfast.comms._native.CallPath", sizeof(CallPath), 0, Py_TPFLAGS_DEFAULT, call_path_slots,
};

#endif
